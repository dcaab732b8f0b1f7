"""SglangEngine against a real SGLang server on the CPU: log-probs, pauses, versions, faults, deaths.

No witness for routing ties: which of two experts with equal scores wins is our launcher's choice (sglang_cpu.py).
"""

import asyncio
import os
import signal
import time
from dataclasses import replace

import numpy as np
import psutil
import pytest
from proxy import Proxy
from scenes import PROMPT, ask, sync, update

from miles_core.errors import EngineError, SyncError

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]
READERS = pytest.mark.parametrize("readers", [0, 2], ids=["driver", "readers"])
"""By how many processes beside the driver answers are read; at 0 it reads them itself."""


def reference(folder, ids, temperature=1.0, experts=None):
    """[len(ids) - 1] float32: transformers' log-prob of each id after those before it.

    experts: [len(ids) - 1, layers, top_k], those that compute each position; -1 where the router chooses.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if experts is not None:
        replay(model, torch.tensor(experts, dtype=torch.int64))
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]])).logits[0] / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


def replay(model, experts):
    """Let these experts compute: of two whose scores are equal to rounding a server may take the other one."""
    import torch

    def chosen(layer, routed):
        logits, _, own = routed
        indices = torch.where(experts[:, layer] < 0, own, experts[:, layer])
        scores = logits.softmax(-1).gather(1, indices)
        return logits, scores / scores.sum(-1, keepdim=True), indices

    for layer, block in enumerate(model.model.layers):
        block.mlp.gate.register_forward_hook(lambda gate, args, routed, layer=layer: chosen(layer, routed))


def check(response, folder, *, temperature=1.0, tolerance=1e-5):
    """Its log-probs are transformers'."""
    expected = reference(folder, [*PROMPT, *response.output_ids.tolist()], temperature)[len(PROMPT) - 1:]
    np.testing.assert_allclose(response.log_probs, expected, atol=tolerance, rtol=0)


async def used(engine, work, models, version=1, model="old"):
    """Start, bring to a version, work, stop."""
    await engine.start()
    try:
        await sync(engine, models[model], version)
        return await work()
    finally:
        await engine.stop()


# One server, no faults.


@pytest.mark.parametrize("sampling", [
    {}, {"temperature": 0.7}, {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.5, "top_k": 20},
], ids=["T=1", "T=0.7", "greedy", "cut"])
def test_log_probs_are_those_of_transformers(beside, models, sampling):
    """Of the temperature-scaled distribution before top-p and top-k cut it; greedy ones at temperature 1."""
    engine = beside()
    responses = asyncio.run(used(engine, lambda: asyncio.gather(*(
        engine.generate(ask(i, 24, **sampling)) for i in range(6))), models))
    for response in responses:
        assert response.finish_reason == "length" and len(response.output_ids) == 24
        check(response, models["old"], temperature=sampling.get("temperature") or 1.0)


@READERS
def test_a_retracted_request_is_the_exact_concatenation_of_its_calls(beside, models, readers):
    """Tokens before the update have the old model's log-probs and version, those after it the new one's."""
    engine = beside(readers=readers)

    async def work():
        calls = [asyncio.ensure_future(engine.generate(ask(i, 300, want=("routed_experts",)))) for i in range(4)]
        await asyncio.sleep(0.5)
        await sync(engine, models["new"], 2)
        return await asyncio.gather(*calls)

    for response in asyncio.run(used(engine, work, models)):
        ids, cut = [*PROMPT, *response.output_ids.tolist()], int((response.versions == 1).sum())
        assert len(response.output_ids) == 300 and response.finish_reason == "length"
        assert 0 < cut < 300 and (response.versions == np.repeat([1, 2], [cut, 300 - cut])).all()
        old, new = (reference(models[name], ids)[len(PROMPT) - 1:] for name in ("old", "new"))
        np.testing.assert_allclose(response.log_probs, np.concatenate([old[:cut], new[cut:]]), atol=2e-5, rtol=0)
        assert np.abs(old - new).max() > 1  # the two models can be told apart
        assert response.extra["routed_experts"].shape == (len(ids) - 1, 2, 2)


def test_experts_are_those_that_computed_each_position_first(beside, models):
    import torch
    from transformers import AutoModelForCausalLM

    engine = beside()

    async def work():
        call = asyncio.ensure_future(engine.generate(ask(0, 600, want=("routed_experts",))))
        await asyncio.sleep(1.0)
        await sync(engine, models["new"], 2)
        return await call

    response = asyncio.run(used(engine, work, models))
    ids, drawn = [*PROMPT, *response.output_ids.tolist()], int((response.versions == 1).sum())
    assert 0 < drawn < 600
    cut = drawn + len(PROMPT) - 1  # the last of them is computed by the next call
    for name, rows in (("old", slice(0, cut)), ("new", slice(cut, None))):
        model = AutoModelForCausalLM.from_pretrained(models[name], dtype=torch.float32).eval()
        with torch.no_grad():
            routers = model(torch.tensor([ids[:-1]]), output_router_logits=True).router_logits
        scores = torch.stack(routers, 1).softmax(-1)
        expected = scores.topk(2, dim=-1).indices.sort(-1).values.numpy()[rows]
        ranked = scores.sort(-1, descending=True).values
        clear = (ranked[..., 1] - ranked[..., 2] > 1e-4).numpy()[rows]  # a tie may go either way
        got = np.sort(response.extra["routed_experts"], -1)[rows]
        assert clear.mean() > 0.95 and (got == expected)[clear].all()


@READERS
def test_in_place_keeps_requests_in_the_server_and_versions_never_run_ahead(beside, models, readers):
    engine = beside(mode="in_place", readers=readers)

    async def work():
        calls = [asyncio.ensure_future(engine.generate(ask(i, 300))) for i in range(4)]
        await asyncio.sleep(0.5)
        await engine.pause("in_place")
        assert len(engine._scheduler.sent) == 4  # nothing came back
        await update(engine, models["new"], 2)
        await engine.resume()
        return await asyncio.gather(*calls)

    for response in asyncio.run(used(engine, work, models)):
        versions = response.versions
        assert len(versions) == 300 and set(versions) == {1, 2} and (np.diff(versions) >= 0).all()
        cut = int((versions == 1).sum())
        old = reference(models["old"], [*PROMPT, *response.output_ids.tolist()])[len(PROMPT) - 1:]
        same = np.abs(response.log_probs - old) < 1e-4
        changed = int(np.argmin(same))  # the first token that the old weights did not draw
        assert changed <= cut and same[:changed].all()


def test_in_place_prefixes_that_an_earlier_run_left_are_not_shared(beside, models):
    """Its versions have the same numbers, and a server that runs already keeps its cache."""
    prompt = tuple(range(200))

    async def answers(engine):
        return await asyncio.gather(*(engine.generate(replace(ask(i, 4), input_ids=prompt)) for i in range(2)))

    for model in ("old", "new"):
        engine = beside(mode="in_place")
        for response in asyncio.run(used(engine, lambda engine=engine: answers(engine), models, model=model)):
            right = reference(models[model], [*prompt, *response.output_ids.tolist()])[len(prompt) - 1:]
            assert np.abs(response.log_probs - right).max() < 1e-4


def test_abort_returns_what_was_drawn(beside, models):
    engine = beside()

    async def work():
        calls = [asyncio.ensure_future(engine.generate(ask(name, 1500))) for name in (1, 10)]
        await asyncio.sleep(0.3)
        await engine.abort(["train-1"])  # SGLang ends every request whose id begins with the one it is given
        assert calls[0].done() and not calls[1].done()
        await engine.abort()
        return await asyncio.gather(*calls)

    for response in asyncio.run(used(engine, work, models)):
        assert response.finish_reason == "abort" and 0 < len(response.output_ids) < 1500
        check(response, models["old"], tolerance=2e-5)


def test_pause_with_abort_ends_all_and_lets_later_requests_wait(beside, models):
    engine = beside()

    async def work():
        first = asyncio.ensure_future(engine.generate(ask(0, 1500)))
        await asyncio.sleep(0.3)
        await engine.pause("abort")
        late = asyncio.ensure_future(engine.generate(ask(1, 5)))
        await asyncio.sleep(0.3)
        assert first.done() and not late.done()
        await engine.resume()
        return await first, await late

    first, late = asyncio.run(used(engine, work, models))
    assert first.finish_reason == "abort" and len(first.output_ids)
    assert late.finish_reason == "length" and len(late.output_ids) == 5


def test_many_requests_in_flight_each_answered_once(beside, models):
    engine = beside(server_concurrency=48)

    async def work():
        calls = [asyncio.ensure_future(engine.generate(ask(i, 16))) for i in range(160)]
        await asyncio.sleep(0.1)
        assert len(engine._scheduler.sent) == 48
        return await asyncio.gather(*calls)

    responses = asyncio.run(used(engine, work, models))
    assert [len(response.output_ids) for response in responses] == [16] * 160
    assert not engine._in_flight and not engine._scheduler.sent


def test_stop_strings_stay_in_the_text(beside, models, tokenizer):
    engine = beside()

    async def work():
        return await asyncio.gather(*(engine.generate(ask(i, 200, stop=("a", "b", "c", "d"))) for i in range(4)))

    for response in asyncio.run(used(engine, work, models)):
        before = tokenizer.decode(response.output_ids[:-1], skip_special_tokens=False)
        assert response.finish_reason == "stop" and set(response.text) & set("abcd") and not set(before) & set("abcd")
        assert response.text == tokenizer.decode(response.output_ids, skip_special_tokens=False)


def test_a_busy_server_does_not_flush_and_says_so(beside, models):
    engine = beside()

    async def work():
        call = asyncio.ensure_future(engine.generate(ask(0, 1500)))
        await asyncio.sleep(0.3)
        with pytest.raises(EngineError, match="flush"):
            await engine.servers[0].client.flush(timeout=0.1)
        await engine.abort()
        await call
        await engine.servers[0].client.flush()

    asyncio.run(used(engine, work, models))


def test_an_unconfirmed_version_is_not_used(beside, models):
    """The server was not updated, so `confirm` refuses, and requests wait."""
    engine = beside()

    async def work():
        await engine.pause()
        with pytest.raises(SyncError, match="does not have weights of version 9"):
            await engine.confirm(engine.stale(9), 9)
        assert engine.version == 1 and engine.servers[0].version == 1
        await engine.resume()
        assert (await engine.generate(ask(0, 3))).versions.tolist() == [1, 1, 1]

    asyncio.run(used(engine, work, models))


def test_requests_that_would_kill_the_server_never_reach_it(beside, models):
    from dataclasses import replace

    engine = beside()

    async def work():
        for prompt, words in (((5000,), "vocabulary"), ((1,) * 2045, "no room"), ((), "no room")):
            with pytest.raises(EngineError, match=words):
                await engine.generate(replace(ask(0, 3), input_ids=prompt))
        long = await engine.generate(replace(ask(0, 100), input_ids=(1,) * 2000))  # up to the end of the context
        assert long.finish_reason == "length" and 40 <= len(long.output_ids) <= 48

    asyncio.run(used(engine, work, models))


def test_memory_is_released_and_occupied_between_requests(beside, models):
    engine = beside()

    async def work():
        await engine.release(["kv_cache", "weights"])
        waiting = asyncio.ensure_future(engine.generate(ask(0, 3)))
        await engine.occupy(["weights"])
        await sync(engine, models["new"], 2)
        await asyncio.sleep(0.2)
        assert not waiting.done()  # the sync is over, but the cache is still somebody else's
        await engine.occupy(["kv_cache"])
        return await waiting

    assert asyncio.run(used(engine, work, models)).versions.tolist() == [2, 2, 2]


# Faults in front of the server.


async def faulted(beside, server, models, path, kind, times, **options):
    """The responses to eight requests while some meet a fault, the engine, and what the proxy saw."""
    async with Proxy(server) as proxy:
        engine = beside(proxy.address, **options)

        async def work():
            proxy.fault(path, kind, times)
            return await asyncio.gather(*(engine.generate(ask(i, 8)) for i in range(8)))

        return await used(engine, work, models), engine, proxy


@pytest.mark.parametrize(("kind", "retried"), [
    ("delay", 0), ("500", 3), ("late 500", 3), ("truncated", 3), ("reset", 3), ("wrong version", 3)])
def test_a_fault_that_passes_loses_and_doubles_nothing(beside, server, models, kind, retried):
    responses, engine, proxy = asyncio.run(faulted(beside, server, models, "/generate", kind, 3))
    assert [len(response.output_ids) for response in responses] == [8] * 8
    assert sum(response.figures.get("engine_retries", 0) for response in responses) == retried
    assert [kind for kind, _ in engine.events].count("request_failed") == retried
    assert proxy.seen["/generate"] == 8 + retried
    assert len({body["rid"] for body in proxy.bodies}) == 8 + retried
    for response in responses:
        check(response, models["old"])


@pytest.mark.parametrize(("kind", "words"), [("500", "the proxy says so"), ("wrong version", "version '77'")])
def test_a_fault_that_stays_is_an_error_in_bounded_time(beside, server, models, kind, words, monkeypatch):
    monkeypatch.setattr("miles_sglang.engine.RETRIES", 3)
    begin = time.monotonic()
    with pytest.raises(EngineError, match=f"failed 4 times.*{words}"):
        asyncio.run(faulted(beside, server, models, "/generate", kind, 10**6))
    assert time.monotonic() - begin < 30


def test_an_answer_that_never_comes_is_the_callers_bound(beside, server, models):
    """The server lives, so nobody but the caller can know; the cancelled call leaves nothing behind."""
    async def late():
        async with Proxy(server) as proxy:
            engine = beside(proxy.address)

            async def work():
                proxy.fault("/generate", "drop")
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(engine.generate(ask(0, 3)), 1.0)
                return await engine.generate(ask(0, 3))

            return await used(engine, work, models)

    assert len(asyncio.run(late()).output_ids) == 3


def test_a_half_applied_update_is_never_served(beside, server, models):
    """The server has loaded the weights and the answer is an error: no version is confirmed, and nothing leaves."""
    async def half():
        async with Proxy(server) as proxy:
            engine = beside(proxy.address)

            async def work():
                proxy.fault("/update_weights_from_disk", "late 500")
                with pytest.raises(EngineError, match="after the fact"):
                    await sync(engine, models["new"], 2)
                waiting = asyncio.ensure_future(engine.generate(ask(0, 3)))
                await asyncio.sleep(1.0)
                assert not waiting.done() and proxy.seen["/generate"] == 0
                await sync(engine, models["new"], 3)
                return await waiting

            return await used(engine, work, models)

    assert asyncio.run(half()).versions.tolist() == [3, 3, 3]


def test_a_server_that_was_restarted_behind_our_back_is_brought_up_to_date(beside, server, models):
    """It answers with weights of another version: it is taken out of use until `recover` has brought it ours."""
    engine = beside()

    async def work():
        async def recover():
            await update(engine, models["old"], engine.version)

        engine.recover = recover
        await engine.servers[0].client.call("/update_weights_from_disk", {
            "model_path": str(models["new"]), "weight_version": "default"}, timeout=60)
        return await engine.generate(ask(0, 8))

    response = asyncio.run(used(engine, work, models))
    assert response.figures["engine_retries"] == 1
    assert [kind for kind, _ in engine.events][:2].count("engine_stale") == 1
    check(response, models["old"])


# Deaths. The server of these tests is the engine's own.


def processes() -> list[psutil.Process]:
    """Our servers' and routers' processes."""
    return [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]


def test_deaths_of_server_and_router_in_mid_rollout(config, tokenizer, models, monkeypatch):
    """SIGKILL of the router, of the server, and a server that hangs: detected within 15 s, recovered, every request
    answered once and with the right weights; afterwards no process is left."""
    from pathlib import Path

    from miles_sglang.engine import SglangEngine

    from miles_core.config.load import with_values
    from miles_core.stages.placement import Local

    beside_python = Path(config.options["sglang"]["server_command"][0]).parent  # smg may be there alone
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:{beside_python}")
    before = {process.pid for process in processes()}

    def ours(word):
        return [process for process in processes() if process.pid not in before and word in " ".join(process.cmdline())]

    async def story():
        chosen = with_values(config, "this test", sglang__router="smg")
        engine = SglangEngine(chosen, tokenizer, Local(chosen))
        seen = []
        engine.event = lambda kind, **fields: seen.append((time.monotonic(), kind))

        async def recover():
            await update(engine, models["old"], engine.version)

        engine.recover = recover
        figures = {}
        await engine.start()
        try:
            await sync(engine, models["old"], 1)
            for what, word, number in (("router", "smg", signal.SIGKILL), ("engine", "sglang_cpu", signal.SIGKILL),
                                       ("engine", "sglang_cpu", signal.SIGSTOP)):
                calls = [asyncio.ensure_future(engine.generate(ask(i, 400))) for i in range(8)]
                await asyncio.sleep(0.5)
                assert not any(call.done() for call in calls)
                begin = time.monotonic()
                victim = min(ours(word), key=lambda process: process.create_time())
                os.kill(victim.pid, number)
                for response in await asyncio.gather(*calls):
                    assert len(response.output_ids) == 400 and set(response.versions) == {1}
                    check(response, models["old"], tolerance=5e-5)
                lost = next(at for at, kind in seen if at > begin and kind == f"{what}_lost")
                figures[f"{what} {number.name}"] = (round(lost - begin, 1), round(time.monotonic() - begin, 1))
                assert lost - begin < 15
        finally:
            await engine.stop()
        return figures

    print("detected, recovered after seconds:", asyncio.run(story()))
    time.sleep(0.5)
    assert [process for process in processes() if process.pid not in before] == []
