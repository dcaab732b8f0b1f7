"""Weight syncs to a real server: it serves what was sent, and never what was half sent."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import tempfile
from dataclasses import replace
from functools import partial

import pytest
import torch
from miles_local.weights import read_tensors
from miles_sglang.sync.broadcast import BroadcastSender
from miles_sglang.sync.disk import DeltaSender, DiskSender
from miles_sglang.sync.ipc import IpcSender
from miles_sglang.sync.sender import Servers, Settings
from miles_sglang.sync.sequence import ServerSync
from miles_sglang.sync.servers import Target
from safetensors.torch import save_file
from scenes import PROMPT, ask

from miles_core.errors import SyncError
from miles_core.hosts import ThreadHost
from miles_core.types import Rank
from miles_core.waits import within


class Trainer:
    """A rank that sends the tensors of a checkpoint, through what a test puts in between."""

    def __init__(self, rank: Rank):
        self.rank, self.sender, self.between = rank, None, lambda stream: stream

    def connect(self, sender):
        if self.sender is not None:
            self.sender.close()
        self.sender = sender
        sender.open(self.rank)

    def hold(self, folder, between=lambda stream: stream):
        self.folder, self.between = folder, between

    def send(self, version):
        return self.sender.send(self.between(read_tensors(self.folder)), version)

    def close(self):
        if self.sender is not None:
            self.sender.close()


def few_changes(stream):
    """Every fifth element of each matrix is another."""
    for name, tensor in stream:
        if tensor.dim() > 1:
            tensor = tensor.clone()
            tensor.view(-1)[::5] *= 1.25
        yield name, tensor


def stacked(stream):
    """The experts of a layer as one tensor for each kind, as a trainer has them that keeps them side by side."""
    pending = {}
    for name, tensor in stream:
        before, number, after = re.fullmatch(r"(.*\.experts\.|)(\d*)(.*)", name).groups()
        pending.setdefault((before, after), []).append(tensor) if number else None
        if not number:
            yield name, tensor
    for (before, after), tensors in pending.items():
        yield f"{before}0-{len(tensors) - 1}{after}", torch.stack(tensors)


def expected(folder, ids, between=lambda stream: stream):
    """Log-probs of ids[len(PROMPT):] by transformers with the weights that the trainer sent."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as sent:
        save_file(dict(between(read_tensors(folder))), f"{sent}/model.safetensors", {"format": "pt"})
        shutil.copy(folder / "config.json", sent)
        model = AutoModelForCausalLM.from_pretrained(sent, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, len(PROMPT) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[len(PROMPT) :])[:, None])[:, 0]


KINDS = {"ipc": IpcSender, "broadcast": BroadcastSender, "disk": DiskSender, "disk-delta": DeltaSender}


class Bench:
    """An engine beside the real server, a trainer, and a sync between them."""

    def __init__(self, beside, config, models, tmp_path, kind, faulty=None, **perf):
        self.config = replace(config, perf=replace(config.perf, **{
            "update_weight_buffer_size": 8_000, "weight_sync_timeout": 60.0, **perf}))
        self.engine, self.models = beside(), models
        self.trainer = ThreadHost("trainer", Trainer, Rank())
        settings = Settings.of(self.config)
        folder = [tmp_path / "disk"] if kind.startswith("disk") else []
        self.sync = ServerSync(self.config, lambda targets: (faulty or KINDS[kind])(settings, targets, *folder))

    async def __aenter__(self):
        await self.engine.start()
        return self

    async def __aexit__(self, *_error):
        await self.trainer.close()
        await self.engine.stop()

    async def hold(self, name, between):
        await self.trainer.hold(self.models[name], between)

    async def bring(self, version, name="new", between=lambda stream: stream):
        await self.hold(name, between)
        return await self.sync.sync(self.trainer, self.engine, version)

    async def serves(self, version, name="new", between=lambda stream: stream):
        """It answers with this version, and with the log-probs of the weights that were sent."""
        response = await self.engine.generate(ask(f"{version}", 8))
        assert response.versions.tolist() == [version] * 8
        ids = [*PROMPT, *response.output_ids.tolist()]
        gap = (torch.tensor(response.log_probs) - expected(self.models[name], ids, between)).abs().max()
        assert gap < 1e-4, gap


@pytest.fixture
def bench(beside, config, models, tmp_path):
    return partial(Bench, beside, config, models, tmp_path)


def total(models):
    return sum(tensor.numel() for _, tensor in read_tensors(models["new"])) * 4


def test_the_server_serves_what_the_trainer_sent(bench, models):
    """CUDA IPC's path; on a CPU the bytes themselves travel."""
    async def main():
        async with bench("ipc") as there:
            figures = await there.bring(1)
            await there.serves(1)
            assert figures["bytes"] == total(models) and figures["tensors"] == len(list(read_tensors(models["new"])))

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["ipc", "broadcast"])
def test_stacked_experts_go_into_the_parameters_of_the_server(bench, kind):
    """Whole, and in parts where a bucket has no room for all; what is served is the model that was sent, with the bits
    of one that was sent expert by expert."""
    async def main():
        for version, (limit, tensors) in ((10, (40_000, 6)), (20, (16_000, 12))):
            async with bench(kind, update_weight_buffer_size=limit) as there:
                target = Target("engine 0", there.engine.servers[0].url)
                (report,) = Servers((target,), Settings.of(there.config)).reports.ask(target, 20, names_only=True)
                assert report["one_by_one"] is None
                await there.bring(version, "old")
                figures = await there.bring(version + 1, between=stacked)
                assert figures["bytes"] == total(there.models)
                assert figures["tensors"] == tensors + sum(
                    ".experts." not in name for name, _ in read_tensors(there.models["new"]))
                answer = await there.engine.generate(ask("the same", 8, temperature=0.0))  # before anything is cached
                await there.serves(version + 1)
                await there.bring(version + 2, "old")
                await there.bring(version + 3)
                again = await there.engine.generate(ask("the same", 8, temperature=0.0))
                assert answer.output_ids.tolist() == again.output_ids.tolist()
                assert list(answer.log_probs) == list(again.log_probs)

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KINDS))
def test_every_version_reaches_the_server(bench, kind):
    async def main():
        async with bench(kind) as there:
            await there.bring(1)
            await there.serves(1)
            figures = await there.bring(2, between=few_changes)
            await there.serves(2, between=few_changes)
            if kind == "disk-delta":
                assert 0.15 < figures["density"] < 0.25 and figures["bytes"] < total(there.models) / 2
            await there.bring(3, "old")
            await there.serves(3, "old")
            assert await there.bring(3, "old") == {"tensors": 0, "bytes": 0}

    asyncio.run(main())


class LosesABucket(IpcSender):
    """Its third bucket never arrives."""

    def _post(self, packed):
        self.count = getattr(self, "count", 0) + 1
        return super()._post(packed) if self.count != 3 else None


class FlipsABit(IpcSender):
    """One bit of a bucket is another on arrival."""

    number = 3

    def _gathered(self, bucket, report=None):
        self.count = getattr(self, "count", 0) + 1
        if self.count != self.number or bucket is None:
            return super()._gathered(bucket, report)
        bucket.buffer[5] ^= 4
        packed = super()._gathered(bucket, report)
        bucket.buffer[5] ^= 4
        return packed


class FlipsABitOfAStack(FlipsABit):
    """The first tensor of its bucket is one of stacked experts."""

    number = 1

    def _gathered(self, bucket, report=None):
        assert bucket is None or hasattr(self, "count") or ".experts.0-3." in bucket.tensors[0][0]
        return super()._gathered(bucket, report)


def test_a_flipped_bit_of_a_stack_is_caught(bench):
    def experts_first(stream):
        yield from sorted(stacked(stream), key=lambda pair: ".experts." not in pair[0])

    async def main():
        async with bench("ipc", FlipsABitOfAStack, update_weight_buffer_size=40_000) as there:
            with pytest.raises(SyncError, match="does not hold the weights.*w13_weight"):
                await there.bring(1, between=experts_first)

    asyncio.run(main())


class SwapsLayers(IpcSender):
    """Tensors of layer 0 arrive under the names of layer 1, and the other way round."""

    def _gathered(self, bucket, report=None):
        if bucket is None:
            return super()._gathered(bucket, report)
        other = {"layers.0.": "layers.1.", "layers.1.": "layers.0."}
        right = bucket.tensors
        bucket.tensors = [(next((name.replace(a, b) for a, b in other.items() if a in name), name), *rest)
                          for name, *rest in right]
        packed = super()._gathered(bucket, report)
        bucket.tensors = right
        return packed


class Misspells(IpcSender):
    """A tensor has a shape that the model refuses."""

    def _gathered(self, bucket, report=None):
        if bucket is not None:
            bucket.tensors = [(name, dtype, [*shape, 1] if name.endswith("o_proj.weight") else shape, start)
                              for name, dtype, shape, start in bucket.tensors]
        return super()._gathered(bucket, report)


@pytest.mark.slow
@pytest.mark.parametrize(("faulty", "said"), [
    (LosesABucket, "does not hold the weights"), (FlipsABit, "does not hold the weights"),
    (SwapsLayers, "does not hold the weights"), (Misspells, "could not load"),
])
def test_a_half_applied_update_is_caught_and_never_serves(bench, faulty, said):
    async def main():
        async with bench("ipc", faulty) as there:
            with pytest.raises(SyncError, match=said):
                await there.bring(1)
            (server,) = there.engine.servers
            assert server.version == 0 and there.engine.version == 0
            waiting = asyncio.ensure_future(there.engine.generate(ask("half", 4)))
            await asyncio.sleep(0.5)
            assert not waiting.done(), "nothing is served from half an update"
            there.sync._sender = lambda targets: IpcSender(Settings.of(there.config), targets)
            await there.bring(2)  # the server lives, and a whole sync heals it
            async with within(30, lambda: AssertionError("it does not answer")):
                assert (await waiting).versions.tolist() == [2] * 4
            await there.serves(2)

    asyncio.run(main())


@pytest.mark.slow
def test_the_check_of_equality_restores_every_bit_of_the_checkpoint(bench):
    async def main():
        async with bench("ipc") as there:
            (server,) = there.engine.servers
            await there.bring(1, "old")
        async with bench("ipc", check_weight_update_equal=True) as there:
            await there.bring(1, "old")
            await there.serves(1, "old")
            assert not there.sync._equal, "only the first sync compares"
        async with bench("ipc", check_weight_update_equal=True) as there:
            with pytest.raises(SyncError, match="weights_checker"):
                await there.bring(1, "new")
        async with bench("ipc") as there:
            await there.bring(1, "new")

    asyncio.run(main())


@pytest.mark.slow
def test_a_group_that_never_forms_names_the_server(bench):
    """A second server takes the request to join and does not come."""
    async def main():
        with socket.create_server(("127.0.0.1", 0)) as silent:
            async with bench("broadcast") as there:
                await there.bring(1)
                sender = BroadcastSender(replace(Settings.of(there.config), timeout=12.0), ())
                real = Target("engine 0", there.engine.servers[0].url)
                await asyncio.to_thread(sender.open, Rank(1))  # nothing is asked of a rank that only takes part
                sender._backend, sender._name, sender._servers = "gloo", "never", Servers((real,), sender.settings)
                sender.targets = (real, Target("engine 1", f"http://127.0.0.1:{silent.getsockname()[1]}"))
                with pytest.raises(SyncError, match="engine 1 had not joined the gloo group of 3 ranks"):
                    await asyncio.to_thread(sender._meet)
                await there.bring(2)
                await there.serves(2)

    asyncio.run(main())


@pytest.mark.slow
def test_a_lagging_server_is_brought_up_without_a_pause_of_the_others(bench):
    async def main():
        async with bench("broadcast") as there:
            await there.bring(1)
            (server,) = there.engine.servers
            paused = []
            real = there.engine.pause
            there.engine.pause = lambda mode: (paused.append(mode), real(mode))[1]
            server.version = 0  # as after a restart
            assert (await there.bring(1))["tensors"] > 0 and server.version == 1 and not paused
            await there.serves(1)

    asyncio.run(main())
