"""VllmEngine against a real vLLM server on the CPU: the contract, log-probs, versions, pauses, deaths."""

import asyncio
import os
import signal

import numpy as np
import psutil
import pytest
from miles_testing import engine_contract
from miles_testing import engines as kit
from miles_testing.engines import session
from miles_vllm.files import weights_folder
from small_server import MODEL, weights

from miles_core.errors import EngineError, SyncError
from miles_core.stages.rollout import Request, SamplingParams

PROMPT = (256, 10, 20, 30, 40)


def ask(name: object, tokens: int, key: int = 1, **sampling) -> Request:
    params = SamplingParams(**{"max_new_tokens": tokens, "ignore_eos": True, **sampling})
    return Request(f"train-{name}", PROMPT, params, key)


def reference(response, version, temperature=1.0):
    """[N] float32: transformers' log-prob of each drawn token, by the weights of a version."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    model.load_state_dict(dict(weights(version)), strict=False)
    ids = torch.tensor([[*PROMPT, *response.output_ids.tolist()]])
    with torch.no_grad():
        logits = model(ids).logits[0, :-1] / temperature
    drawn = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]
    return drawn[len(PROMPT) - 1:].numpy()


def close(response, version, temperature=1.0):
    np.testing.assert_allclose(response.log_probs, reference(response, version, temperature), atol=5e-5, rtol=0)


def test_it_satisfies_the_contract_of_engines(make, monkeypatch):
    """The kit's checks; each gets an engine of its own, whose server takes a minute to start."""
    monkeypatch.setattr(kit, "PATIENCE", 300.0)
    engine_contract(make, weights, vocabulary=264)


def test_log_probs_versions_pauses_and_refusals_at_temperature_1(make):
    engine = make()

    async def work():
        requests = [ask(0, 24), ask(1, 24, temperature=0.0), ask(2, 24, top_p=0.5, top_k=3),
                    ask(3, 24, min_new_tokens=9)]
        for response in await asyncio.gather(*map(engine.generate, requests)):
            assert response.finish_reason == "length" and set(response.versions.tolist()) == {1}
            close(response, 1)
        with pytest.raises(EngineError) as refused:
            await engine.generate(ask(4, 4, temperature=0.7))
        assert refused.value.code == "vllm-request-inexact"

        await draws_are_keyed(engine)
        await retracted(engine)
        await kept_in_place(engine)
        await stops(engine)

    session(engine, weights(1), work, seconds=500)


async def draws_are_keyed(engine):
    """The same key gives the same tokens, another one others; greedy answers do not depend on it."""
    first, again, other = [await engine.generate(ask(0, 40, key)) for key in (5, 5, 6)]
    assert first.output_ids.tolist() == again.output_ids.tolist() != other.output_ids.tolist()


async def retracted(engine):
    """Tokens before an update have the old weights' log-probs and version, those after it the new ones'."""
    call = asyncio.ensure_future(engine.generate(ask("long", 500)))
    await asyncio.sleep(0.2)
    await engine.pause("retract")
    await engine.update_weights(weights(2), 2)
    await engine.resume()
    mixed(await call, 1, 2)
    close(await engine.generate(ask("new", 24)), 2)  # the tied output layer's weights are new as well


async def kept_in_place(engine):
    call = asyncio.ensure_future(engine.generate(ask("long", 500)))
    await asyncio.sleep(0.2)
    await engine.pause("in_place")
    assert [one.server is not None for one in engine._calls.values()] == [True]  # nothing came back
    await engine.update_weights(weights(3), 3)
    await engine.resume()
    response = await call
    versions, cut = response.versions, int((response.versions == 2).sum())
    assert len(versions) == 500 and 0 < cut < 500 and (versions == np.repeat([2, 3], [cut, 500 - cut])).all()
    np.testing.assert_allclose(response.log_probs[:cut], reference(response, 2)[:cut], atol=5e-5, rtol=0)
    await engine.pause("in_place")
    call = asyncio.ensure_future(engine.generate(ask("late", 8)))
    await asyncio.sleep(0.1)
    await engine.abort()
    assert (await call).finish_reason == "abort"
    await engine.resume()


def mixed(response, old, new):
    cut = int((response.versions == old).sum())
    count = len(response.versions)
    assert count == 500 and 0 < cut < 500 and (response.versions == np.repeat([old, new], [cut, 500 - cut])).all()
    before, after = reference(response, old), reference(response, new)
    np.testing.assert_allclose(response.log_probs, np.concatenate([before[:cut], after[cut:]]), atol=5e-5, rtol=0)
    assert np.abs(before - after).max() > 0.5  # the two can be told apart


async def stops(engine):
    """Stop ids and strings end an answer and stay in it."""
    long = await engine.generate(ask("stop", 40, key=5))
    stop = long.output_ids.tolist()[10]
    first = long.output_ids.tolist().index(stop)
    by_id = await engine.generate(ask("stop", 40, key=5, stop_token_ids=(stop,)))
    assert by_id.finish_reason == "stop" and by_id.output_ids.tolist() == long.output_ids.tolist()[: first + 1]
    by_text = await engine.generate(ask("stop", 40, key=5, stop=(long.text[5:7],)))
    assert by_text.finish_reason == "stop" and long.text[5:7] in by_text.text
    assert by_text.output_ids.tolist() == long.output_ids.tolist()[: len(by_text.output_ids)]


def test_log_probs_at_another_temperature_and_a_server_that_is_killed(make):
    """A killed server is started again, and gets its weights by `recover`; the request that it had is drawn anew.
    Files that are not what was written are not served."""
    engine = make(temperature=0.7)

    async def work():
        close(await engine.generate(ask(0, 24, temperature=0.7)), 1, 0.7)
        with pytest.raises(EngineError) as refused:
            await engine.generate(ask(1, 4, temperature=0.7, top_p=0.9))
        assert refused.value.code == "vllm-request-inexact"

        folder = weights_folder(engine._config) / "version-1"

        async def recover():
            await engine.load(folder, 1)

        engine.recover = recover
        call = asyncio.ensure_future(engine.generate(ask(2, 400, temperature=0.7)))
        await asyncio.sleep(0.2)
        os.kill(process_of(engine), signal.SIGKILL)
        response = await call
        assert len(response.output_ids) == 400 and response.figures["engine_retries"] >= 1
        assert [kind for kind, _ in engine.events if kind.startswith("engine")] == ["engine_lost", "engine_restarted"]
        close(await engine.generate(ask(3, 24, temperature=0.7)), 1, 0.7)

        file = next(folder.glob("*.safetensors"))
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        await engine.pause()
        with pytest.raises(SyncError) as torn:
            await engine.load(folder, 2)
        assert torn.value.code == "sync-load-failed" and engine.version == 1
        await engine.resume()
        with pytest.raises(SyncError):  # it is behind, so that its watch has it load them again
            await asyncio.wait_for(engine.generate(ask(4, 4, temperature=0.7)), 60)

    session(engine, weights(1), work, seconds=500)


def process_of(engine) -> int:
    """The id of its only server's process."""
    port = engine.servers[0].client.url.rpartition(":")[2]
    return next(child.pid for child in psutil.Process().children(recursive=True) if port in child.cmdline())
