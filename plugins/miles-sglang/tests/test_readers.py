"""Readers: the same answers as the driver reads itself, and what becomes of calls whose reader or connection ends."""

import asyncio
import contextlib
import os
import signal
import socket

import numpy as np
import pytest
from miles_sglang.client import Answer
from miles_sglang.hardware import readers
from miles_sglang.in_flight import _computed_again
from miles_sglang.packets import INLINE, MAPPED, Channel, pair
from miles_sglang.plugin import SglangOptions
from miles_sglang.reader import merged
from miles_sglang.readers import backend
from wire import Wire, log_prob, next_token

from miles_core.errors import EngineError


@contextlib.asynccontextmanager
async def started(make, **options):
    """An engine with a reader over a server."""
    async with Wire() as wire:
        engine = make(wire, readers=1, **options)
        await engine.start()
        try:
            async with asyncio.timeout(30):
                yield engine, wire
        finally:
            await engine.stop()


async def running(wire, count):
    async with asyncio.timeout(20):
        while len(wire.running) < count:
            await asyncio.sleep(0.005)


def check(response, count):
    ids = [5, 6, 7]
    for token, value in zip(response.output_ids.tolist(), response.log_probs.tolist(), strict=True):
        assert (token, value) == (next_token(ids), log_prob(ids, token))
        ids.append(token)
    assert len(ids) == 3 + count and response.text == "".join(chr(48 + token) for token in ids[3:])


def process(engine):
    return engine._readers._all[0]


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_an_update_in_the_middle_leaves_each_token_with_its_version(engine_over, ask, mode):
    async def story():
        async with started(engine_over, mode=mode) as (engine, wire):
            wire.version = "1"
            await engine.confirm(engine.servers, 1)
            call = asyncio.ensure_future(engine.generate(ask("a", 150, want=["routed_experts"])))
            await wire.draws(40)
            await engine.pause(mode)
            wire.version = "2"
            await engine.confirm(engine.servers, 2)
            await engine.resume()
            response = await call
            check(response, 150)
            assert set(response.versions) == {1, 2} and (np.diff(response.versions) >= 0).all()
            rows = response.extra["routed_experts"]
            assert rows[:, 0, 0].tolist() == [5, 6, 7, *response.output_ids.tolist()][:-1] and rows.dtype == np.uint8
            assert len(wire.requests) == {"retract": 2, "in_place": 1}[mode]

    asyncio.run(story())


def test_calls_that_are_aborted_or_cancelled_end_at_the_server(engine_over, ask):
    async def story():
        async with started(engine_over) as (engine, wire):
            aborted, cancelled = (asyncio.ensure_future(engine.generate(ask(name, 190))) for name in "ab")
            await running(wire, 2)
            cancelled.cancel()
            await running_less(wire, 2)
            await engine.abort(["train-a"])
            response = await aborted
            assert response.finish_reason == "abort" and not process(engine).calls and not wire.running
            check(response, len(response.output_ids))
            wire.plan = [400]
            with pytest.raises(EngineError) as error:
                await engine.generate(ask("c", 3))
            assert error.value.code == "server-request-rejected"

    async def running_less(wire, count):
        while len(wire.running) >= count:
            await asyncio.sleep(0.005)

    asyncio.run(story())


def test_a_reader_that_is_killed_is_started_again_and_its_calls_are_sent_again(engine_over, ask):
    async def story():
        async with started(engine_over) as (engine, wire):
            call = asyncio.ensure_future(engine.generate(ask("a", 100)))
            await running(wire, 1)
            first = process(engine)._popen
            os.kill(first.pid, signal.SIGKILL)
            response = await call
            check(response, 100)
            assert engine.events == ["reader_lost", "request_failed"] and response.figures["engine_retries"] == 1
            assert process(engine)._popen.pid != first.pid and first.returncode == -signal.SIGKILL
            last = process(engine)._popen
        assert last.returncode == 0, "it ends with the driver's end of the socket"

    asyncio.run(story())


def test_a_reset_of_the_client_fails_what_its_readers_wait_for(engine_over, ask):
    async def story():
        async with started(engine_over) as (engine, wire):
            call = asyncio.ensure_future(engine.generate(ask("a", 60)))
            await running(wire, 1)
            await engine.servers[0].client.reset()
            check(await call, 60)
            assert engine.events == ["request_failed"] and len(wire.requests) == 2

    asyncio.run(story())


def test_a_reader_that_does_not_start_is_a_named_error(engine_over, monkeypatch):
    monkeypatch.setattr("miles_sglang.readers.PROGRAM", "raise SystemExit(3)")

    async def story():
        with pytest.raises(EngineError) as error:
            async with started(engine_over):
                pass
        assert error.value.code == "reader-not-started" and "code 3" in error.value.got

    asyncio.run(story())


@pytest.mark.parametrize(("cores", "asked", "count"), [(7, None, 0), (8, None, 1), (20, None, 2), (192, None, 4),
                                                       (192, 0, 0), (2, 3, 3)])
def test_machines_of_many_cores_have_readers_unless_told_otherwise(monkeypatch, cores, asked, count):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    assert readers(SglangOptions(readers=asked)) == count


@pytest.mark.parametrize("size", [10, INLINE, MAPPED // 2, 2 * MAPPED], ids=["inline", "beside", "copied", "mapped"])
def test_packets_arrive_whole_in_order_and_may_be_changed(size):
    """More than a socket holds, of which each is sent once there is room."""
    async def story():
        here, there = pair()
        got, lost, done = [], asyncio.Event(), asyncio.Event()

        def received(key, message):
            got.append((key, message))
            if len(got) == 300 or size > INLINE and len(got) == 20:
                done.set()

        left, right = Channel(here, lambda *_: None, lambda: None), Channel(there, received, lost.set)
        for key in range(300 if size <= INLINE else 20):
            left.send(key, {"a": np.full(size, key % 100, np.int8), "b": key})
        async with asyncio.timeout(20):
            await done.wait()
            for at, (key, message) in enumerate(got):
                assert at == key == message["b"] and message["a"].tobytes() == bytes([key % 100]) * size
            message["a"][0] = 1
            left.close()
            await lost.wait()
        right.close()

    asyncio.run(story())


def test_packets_that_wait_for_room_are_not_each_tried_again_and_again(monkeypatch):
    """1,000 of which a socket holds a few dozen: one wait for room, whatever is behind it."""
    tries = []
    send = socket.send_fds
    monkeypatch.setattr(socket, "send_fds", lambda *args: tries.append(1) or send(*args))

    async def story():
        here, there = pair()
        got, done = [], asyncio.Event()
        left = Channel(here, lambda *_: None, lambda: None)
        for key in range(1000):
            left.send(key, bytes(INLINE // 8))
        right = Channel(there, lambda key, _: got.append(key) or (key == 999 and done.set()), lambda: None)
        async with asyncio.timeout(20):
            await done.wait()
        left.close()
        right.close()
        assert got == list(range(1000)) and len(tries) < 3 * len(got)

    asyncio.run(story())


@pytest.mark.parametrize("seed", range(5))
def test_merged_pieces_say_what_they_said_apart(seed):
    draw = np.random.default_rng(seed)
    pieces, version, retractions = [], 1, 0
    for number in range(60):
        version, retractions = version + (draw.random() < 0.1), retractions + (draw.random() < 0.1)
        pieces.append(Answer(np.arange(number, number + draw.integers(0, 4), dtype=np.int32), np.zeros(0), None,
                             str(version), counts={"num_retractions": int(retractions), "cached_tokens": number}))
        pieces[-1].log_probs = -pieces[-1].ids.astype(np.float32)

    def told(pieces):
        versions = [1, *(int(piece.version) for piece in pieces)][:-1]
        each = np.repeat(versions, [len(piece.ids) for piece in pieces]).tolist()
        ids, log_probs = (np.concatenate([getattr(one, name) for one in pieces]) for name in ("ids", "log_probs"))
        again = _computed_again(pieces, versions).tolist()
        return each, again, ids.tolist(), log_probs.tolist(), pieces[-1].counts

    before, fewer = told(pieces), merged(pieces)
    assert len(fewer) < len(pieces) and told(fewer) == before


def test_a_piece_of_another_answer_is_not_merged_into_this_one():
    pieces = [Answer(np.ones(1, np.int32), np.zeros(1), None, "1", rid=rid) for rid in ("a", "a", "b", "a")]
    assert "b" in [piece.rid for piece in merged(pieces)]


def test_texts_are_left_to_tokenizers_that_decode_in_a_way_of_their_own(tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    class Own(PreTrainedTokenizerFast):
        def decode(self, *args, **kwargs):
            return "own"

    plain = Tokenizer(models.WordLevel({"a": 0}, "a"))
    fast = PreTrainedTokenizerFast(tokenizer_object=plain)
    assert backend(fast).decode([0]) == fast.decode([0]) == "a"
    assert backend(Own(tokenizer_object=plain)) is None and backend(object()) is None
    fast.clean_up_tokenization_spaces = True
    assert backend(fast) is None


def test_a_call_that_cannot_be_sent_is_sent_again(engine_over, ask, monkeypatch):
    async def story():
        async with started(engine_over) as (engine, _):
            channel = process(engine)._channel
            send, failures = channel.send, [OSError(24, "Too many open files")]

            def full(key, message):
                if failures:
                    raise failures.pop()
                send(key, message)

            monkeypatch.setattr(channel, "send", full)
            check(await engine.generate(ask("a", 5)), 5)
            assert engine.events == ["request_failed"] and not process(engine).calls

    asyncio.run(story())
