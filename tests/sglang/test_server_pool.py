"""Two real servers behind a real router: both are used, both get the weights, and any of the three may die."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from miles_sglang.client import Failed
from miles_sglang.engine import SglangEngine
from miles_sglang.router import Router
from miles_sglang.sync.sequence import ServerSync
from scenes import PROMPT, ask
from test_conformance import check, processes
from test_sync import KINDS, Settings, Trainer

from miles_core.config.load import with_values
from miles_core.config.tables import Debug
from miles_core.hosts import ThreadHost
from miles_core.stages.placement import Local
from miles_core.types import Rank
from miles_core.waits import within

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]


@pytest.fixture(autouse=True)
def routers(config, monkeypatch):
    """smg may be in the environment of the servers alone."""
    launcher = config.options["sglang"]["server_command"]
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:{Path(launcher[0]).parent}")


class Pool:
    """An engine of two servers behind smg, and a trainer that brings them weights."""

    def __init__(self, config, tokenizer, models, run_dir):
        self.config = replace(
            config, checkpoint=replace(config.checkpoint, run_dir=str(run_dir)), debug=Debug(),
            surfaces={"server": {"max_total_tokens": 8192}},
            perf=replace(config.perf, rollout_num_gpus=2, rollout_num_gpus_per_engine=1, weight_sync_timeout=120.0,
                         update_weight_buffer_size=8_000),
            options={"sglang": {**config.options["sglang"], "router": "smg"}})  # fmt: skip
        self.engine = SglangEngine(self.config, tokenizer, Local(self.config))
        self.models, self.logs, self.events = models, run_dir / "logs", []
        self.engine.event = lambda kind, **fields: self.events.append((time.monotonic(), kind, fields))
        self.trainer = ThreadHost("trainer", Trainer, Rank())

    @asynccontextmanager
    async def running(self):
        await self.engine.start()
        try:
            yield self
        finally:
            await self.trainer.close()
            await self.engine.stop()

    async def bring(self, kind, version, name):
        """A sync; from here on restarted servers are brought the same weights in the same way."""
        sync = ServerSync(self.config, lambda targets: KINDS[kind](Settings.of(self.config), targets))
        await self.trainer.hold(self.models[name])

        async def recover():
            figures = await sync.sync(self.trainer, self.engine, version)
            self.engine.event("weights_brought")
            return figures

        self.engine.recover = recover
        return await recover()

    def ask(self, count, tokens):
        return [asyncio.ensure_future(self.engine.generate(ask(i, tokens))) for i in range(count)]

    async def answers(self, calls, tokens, version, name):
        """All of them are whole, of this version, and with its log-probs."""
        responses = await asyncio.gather(*calls)
        for response in responses:
            assert len(response.output_ids) == tokens and set(response.versions) == {version}
            check(response, self.models[name], tolerance=5e-5)
        return responses

    def served(self):
        """Requests that each server has answered, by its own log."""
        return [(self.logs / f"engine-{i}.log").read_text().count("POST /generate HTTP/1.1\" 200") for i in range(2)]

    async def since(self, begin, kind, seconds):
        """When this was told, in seconds after `begin`."""
        async with within(seconds, lambda: AssertionError(f"no {kind} in {seconds} s: {self.events}")):
            while not (found := [at for at, what, _ in self.events if at > begin and what == kind]):
                await asyncio.sleep(0.05)
        return round(found[0] - begin, 1)


def test_two_servers_behind_smg_share_work_and_weights_and_may_die(config, tokenizer, models, tmp_path):
    """No request is lost or answered from other weights when a server or the router is killed in mid-rollout; the rest
    goes on meanwhile, and afterwards both servers are used again. In the end no process is left."""
    before = {process.pid for process in processes()}
    figures = {}

    def kill(word):
        victims = [p for p in processes() if p.pid not in before and word in " ".join(p.cmdline())]
        os.kill(min(victims, key=lambda process: process.create_time()).pid, signal.SIGKILL)
        return time.monotonic()

    async def shared(pool, version, name):
        """A rollout in which both servers take part equally."""
        earlier = pool.served()
        await pool.answers(pool.ask(24, 16), 16, version, name)
        await asyncio.sleep(0.2)
        assert [now - then for now, then in zip(pool.served(), earlier, strict=True)] == [12, 12]

    async def story():
        async with Pool(config, tokenizer, models, tmp_path).running() as pool:
            assert (await pool.bring("ipc", 1, "new"))["tensors"]
            await shared(pool, 1, "new")
            assert (await pool.bring("broadcast", 2, "old"))["tensors"]
            await shared(pool, 2, "old")

            calls = pool.ask(16, 400)
            await asyncio.sleep(1.0)
            assert not any(call.done() for call in calls)
            begin = kill("sglang_cpu")
            await pool.answers(calls, 400, 2, "old")
            figures["server: answered"] = round(time.monotonic() - begin, 1)
            figures["server: detected"] = await pool.since(begin, "engine_lost", 1)
            assert figures["server: detected"] < 5
            restarted = await pool.since(begin, "engine_restarted", 300)
            assert figures["server: answered"] < restarted, "the other took over"
            figures["server: in use again"] = await pool.since(begin, "weights_brought", 60)
            await shared(pool, 2, "old")

            calls = pool.ask(16, 400)
            await asyncio.sleep(1.0)
            begin = kill("smg")
            await pool.answers(calls, 400, 2, "old")
            figures["router: answered"] = round(time.monotonic() - begin, 1)
            figures["router: detected"] = await pool.since(begin, "router_lost", 1)
            figures["router: restarted"] = await pool.since(begin, "router_restarted", 1)
            assert figures["router: detected"] < 5

            await pool.engine.pause()
            begin = kill("smg")  # while the servers draw no token, which a router asks them for
            await pool.since(begin, "router_restarted", 30)
            await pool.bring("broadcast", 3, "new")
            await shared(pool, 3, "new")

    asyncio.run(story())
    print(figures)
    time.sleep(0.5)
    assert [process for process in processes() if process.pid not in before] == []


@pytest.mark.skipif(not (find_spec("sglang_router") or shutil.which("sglang-router")), reason="no sglang-router")
def test_sglang_router_takes_and_gives_up_a_worker_and_loses_routed_experts(config, server, tmp_path):
    """Through the same calls as smg."""
    router = Router(with_values(config, "this test", sglang__router="sglang-router"), tmp_path / "router.log")
    body = {"input_ids": list(PROMPT), "sampling_params": {"max_new_tokens": 4, "ignore_eos": True},
            "return_logprob": True, "return_routed_experts": True}

    async def story():
        await router.start()
        try:
            for _ in range(2):
                await router.add(server)
                answer = await router.client.generate(body)
                assert len(answer.ids) == 4 and answer.experts is None
                await router.remove(server)
                with pytest.raises(Failed):
                    await router.client.generate(body)
        finally:
            await router.stop()

    asyncio.run(story())
