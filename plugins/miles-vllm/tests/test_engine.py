"""VllmEngine over servers that speak vLLM's wire format: the contract, and answers that must not be trained on.

tests/vllm holds the same engine against the real server.
"""

import asyncio
from pathlib import Path

import pytest
from miles_testing import engine_contract
from miles_testing.engines import session
from miles_vllm import engine as engine_module
from miles_vllm.sync import FileSync

from miles_core.errors import EngineDiedError, EngineError, SyncError
from miles_core.stages.rollout import Request, SamplingParams

MODEL = Path(__file__).parents[3] / "examples" / "arithmetic" / "tiny-qwen3"
NONSENSE, DIES, SILENT, NO_VERSIONS, REFUSES, HTML = 90, 91, 92, 93, 94, 95
"""First tokens of prompts, for wire_server.py."""


def weights(version):
    from safetensors.torch import load_file

    return list(load_file(MODEL / "model.safetensors").items())


def ask(first: int = 1, tokens: int = 4, **sampling) -> Request:
    return Request(f"train-{first}", (first, 2, 3), SamplingParams(**{"max_new_tokens": tokens, **sampling}), key=1)


async def until(engine, event, seconds=60):
    """Wait until the engine has told an event of that kind."""
    async with asyncio.timeout(seconds):
        while not any(kind == event for kind, _ in engine.events):
            await asyncio.sleep(0.05)


def test_it_satisfies_the_contract_of_engines(make):
    engine_contract(make, weights, vocabulary=264)


@pytest.mark.parametrize("first, code", [
    (NONSENSE, "request-retries-exhausted"), (NO_VERSIONS, "request-retries-exhausted"),
    (HTML, "request-retries-exhausted"), (REFUSES, "server-request-rejected"),
], ids=["a log-prob too few", "no versions", "no JSON", "HTTP 400"])
def test_an_answer_that_cannot_be_used_is_asked_for_again_and_then_an_error(make, monkeypatch, first, code):
    monkeypatch.setattr(engine_module, "RETRIES", 1)
    engine = make()

    async def work():
        with pytest.raises(EngineError) as refused:
            await engine.generate(ask(first))
        assert len((await engine.generate(ask())).output_ids) == 4  # it goes on
        return refused.value

    assert session(engine, weights(1), work).code == code


def test_a_server_that_dies_is_replaced_and_named_when_it_dies_too_often(make, monkeypatch):
    engine = make(max_restarts=1)

    async def work():
        async def recover():
            await engine.load(next((Path(engine._config.checkpoint.run_dir) / "weights").glob("version-*")), 1)

        engine.recover = recover
        call = asyncio.ensure_future(engine.generate(ask(DIES)))
        await until(engine, "engine_restarted")
        with pytest.raises(EngineDiedError) as died:  # sent again, it kills the next one
            await call
        return died.value

    error = session(engine, weights(1), work)
    assert error.code == "server-died" and error.who == "engine 0" and "code 7" in error.got
    lost = [fields for kind, fields in engine.events if kind == "engine_lost"]
    assert len(lost) == 2 and all("RuntimeError: no kernel for this prompt" in each["why"] for each in lost)
    assert {Path(each["log"]).name for each in lost} == {"engine-0.log"}


def test_a_death_is_seen_by_the_request_that_fails(make, monkeypatch):
    """Before it has spent its tries on a dead server."""
    engine = make()

    async def work():
        monkeypatch.setattr("miles_vllm.servers.LOOK", 60.0)
        await asyncio.sleep(0.6)  # the watch has begun its wait
        call = asyncio.ensure_future(engine.generate(ask(DIES)))
        await until(engine, "engine_lost", 20)
        call.cancel()

    session(engine, weights(1), work)


def test_a_start_anew_that_fails_is_one_of_those_that_are_allowed(make, tmp_path):
    """What died may hold its memory for a while."""
    engine = make(args=[f"fails-once={tmp_path / 'fails'}"])

    async def work():
        (tmp_path / "fails").touch()
        call = asyncio.ensure_future(engine.generate(ask(DIES)))
        await until(engine, "engine_restarted")
        call.cancel()

    session(engine, weights(1), work)
    [restarted] = [fields for kind, fields in engine.events if kind == "engine_restarted"]
    lost = [fields["why"] for kind, fields in engine.events if kind == "engine_lost"]
    assert restarted["restarts"] == 2 and "RuntimeError: the memory is not free yet" in lost[1]


def test_a_request_that_is_never_answered_can_be_given_up(make):
    engine = make()

    async def work():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.generate(ask(SILENT)), 0.3)
        assert len((await engine.generate(ask())).output_ids) == 4

    session(engine, weights(1), work)


def test_who_comes_back_after_a_sync_with_nobody_alive_lags_behind(make):
    """A server that comes up has version 0, and with an engine of version 0 it got no weights and no requests."""
    class Trainer:
        async def connect(self, sender):
            self.sender = sender

        async def send(self, version):  # a folder of this name may be there from an earlier start
            return {"tensors": version, "bytes": 2}

    engine = make()
    figures = asyncio.run(FileSync(engine._config).sync(Trainer(), engine, 1))
    assert figures["tensors"] == 1 and engine.version == 1


def test_weights_that_a_server_cannot_load_are_not_served(make):
    engine = make(args=["refuse-weights"])

    async def run():
        try:
            await engine.start()
            with pytest.raises(SyncError) as refused:
                await engine.update_weights(weights(1), 1)
            assert engine.version == 0 and not engine._pool.usable()
            return refused.value
        finally:
            await engine.stop()

    error = asyncio.run(asyncio.wait_for(run(), 60))
    assert error.code == "sync-load-failed" and "engine 0" in str(error)


def test_a_server_that_does_not_come_up_is_named_with_the_end_of_its_log(make):
    engine = make(args=["fail"])
    with pytest.raises(EngineError) as failed:
        asyncio.run(asyncio.wait_for(engine.start(), 60))
    assert failed.value.code == "vllm-server-start-failed" and failed.value.who == "engine 0"
    assert "--vllm-python" in failed.value.fix and "ModuleNotFoundError" in failed.value.fix


def test_a_stream_of_other_shapes_or_without_a_layer_reaches_no_server(make):
    engine = make()
    whole = weights(2)
    name, tensor = next(pair for pair in whole if "layers.1" in pair[0] and pair[1].ndim == 2)

    short = [pair for pair in whole if "layers.1." not in pair[0]]
    cut = [*(pair for pair in whole if pair[0] != name), (name, tensor[:-1])]

    async def work():
        for bad, code in ((short, "vllm-weights-missing"), (cut, "vllm-weights-misshapen")):
            with pytest.raises(EngineError) as refused:
                await engine.update_weights(bad, 2)
            assert refused.value.code == "vllm-stream-refused" and refused.value.__cause__.code == code
            assert engine.version == 1
        assert set((await engine.generate(ask())).versions.tolist()) == {1}

    session(engine, weights(1), work)


@pytest.mark.parametrize("change, code", [
    ({"temperature": 0.7}, "vllm-request-inexact"), ({"max_new_tokens": 0}, "sampling-lengths-invalid"),
], ids=["another temperature", "no tokens"])
def test_requests_that_vllm_cannot_answer_exactly_are_refused(make, change, code):
    with pytest.raises(EngineError) as refused:
        asyncio.run(make().generate(ask(**change)))
    assert refused.value.code == code


def test_release_is_refused(make):
    with pytest.raises(EngineError) as refused:
        asyncio.run(make().release(["weights"]))
    assert refused.value.code == "vllm-with-colocate"
