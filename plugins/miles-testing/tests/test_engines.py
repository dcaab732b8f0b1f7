"""The kit of engines: the local engine and a small one pass, and each check has an engine that it catches."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from miles_testing import engine_contract, tiny_checkpoint
from miles_testing.clock import run_virtual

from miles_core import rng
from miles_core.errors import EngineError, MilesError
from miles_core.stages.rollout import Response, check_request

VOCABULARY = 264
NAMES = ("embed", "head")


@pytest.fixture
def instant(monkeypatch):
    """No check waits: time is virtual."""
    monkeypatch.setattr(asyncio, "run", lambda main: run_virtual(lambda: main))


def weights(version):
    return [(name, np.float32(10 * version + place)) for place, name in enumerate(NAMES)]


class Small:
    """An engine without a model: a token follows from key, position, prompt and weights, and takes a millisecond."""

    def __init__(self):
        self.version, self.paused, self.held = 0, False, {}
        self.flying, self.ended = set(), set()

    async def start(self):
        """Needs nothing."""

    async def generate(self, request):
        check_request(request, VOCABULARY, experts=False, engine="the small engine")
        self.flying.add(request.id)
        drawn, most, stopped = [], request.sampling.max_new_tokens, False
        while len(drawn) < most and request.id not in self.ended and not stopped:
            if not self.paused:
                draw = np.random.default_rng(self.seed(request, len(drawn)))
                drawn.append((draw.integers(VOCABULARY), -draw.exponential(), self.version))
                stopped = drawn[-1][0] in self.ends(request.sampling)
            await asyncio.sleep(0.001)
        self.flying.discard(request.id)
        self.ended.discard(request.id)
        ids, log_probs, versions = np.array(drawn).reshape(-1, 3).T
        return Response(ids.astype(np.int32), log_probs.astype(np.float32), versions.astype(np.int32),
                        "stop" if stopped else "length" if len(drawn) == most else "abort")

    def ends(self, sampling):
        return () if sampling.ignore_eos else sampling.stop_token_ids

    def seed(self, request, place):
        key = request.key if request.sampling.temperature else 0
        return rng.key(key, repr((self.held, request.input_ids)), place)

    async def abort(self, ids=None):
        self.ended |= self.flying if ids is None else self.flying & set(ids)

    async def pause(self, mode="retract"):
        self.paused = True
        if mode == "abort":
            await self.abort()

    async def resume(self):
        self.paused = False

    async def update_weights(self, weights, version):
        found = dict(weights)
        self.check(found, version)
        self.held, self.version = found, version

    def check(self, found, version):
        if found.keys() != set(NAMES) or version <= self.version:
            raise EngineError("the stream lacks a tensor or is no newer", got=version, fix="send all of a new version")

    async def stop(self):
        await self.abort()


def answering(change):
    """An engine whose answers are changed on their way out."""

    class Changed(Small):
        async def generate(self, request):
            answer = await super().generate(request)
            change(self, answer)
            return answer

    return Changed


def ending(when, reason="stop"):
    """An engine that says of some answers that they ended otherwise."""

    def change(engine, answer):
        if when(engine, answer):
            answer.finish_reason = reason

    return answering(change)


class Hangs(Small):
    async def generate(self, request):
        await asyncio.Event().wait()


class Lingers(Small):
    async def stop(self):
        await asyncio.Event().wait()


class Chatty(Small):
    async def generate(self, request):
        answer = await super().generate(request)
        return Response(*(np.append(part, part[:1]) for part in (answer.output_ids, answer.log_probs, answer.versions)),
                        answer.finish_reason)


class Obedient(Small):
    def ends(self, sampling):
        return sampling.stop_token_ids


class Heated(Small):
    def seed(self, request, place):
        return rng.key(request.key, repr((self.held, request.input_ids)), place)


class Crowded(Small):
    def seed(self, request, place):
        return super().seed(request, place + 1000 * len(self.flying))


class Keyless(Small):
    def seed(self, request, place):
        return rng.key(0, repr((self.held, request.input_ids)), place)


class EndsAll(Small):
    async def abort(self, ids=None):
        await super().abort()


class Sulks(Small):
    """Answers nothing more after an abort, a request that came in a pause, or one that it refused."""

    after: str
    sulking = False

    async def generate(self, request):
        sulking = self.sulking or self.paused and self.after == "pause"
        try:
            answer = await super().generate(request)
        except EngineError:
            self.sulking = self.after == "refusal"
            raise
        none = np.zeros(0, np.int32)
        return Response(none, none, none, "abort") if sulking else answer

    async def abort(self, ids=None):
        self.sulking = self.after == "abort"
        await super().abort(ids)


def sulks(after):
    return type("Sulks", (Sulks,), {"after": after})


class Deaf(Small):
    async def pause(self, mode="retract"):
        """Goes on."""


class Closed(Small):
    """Paused, it holds new requests back, and goes on with the others."""

    closed = False

    async def generate(self, request):
        while self.closed:
            await asyncio.sleep(0.001)
        return await super().generate(request)

    async def pause(self, mode="retract"):
        self.closed = True

    async def resume(self):
        self.closed = False


def rough(wrong):
    """An engine that after a pause of this mode ends what was under way before it."""

    class Rough(Small):
        async def pause(self, mode="retract"):
            self.cut = set(self.flying) if mode == wrong else ()
            await super().pause(mode)

        async def resume(self):
            await self.abort(self.cut)
            await super().resume()

    return Rough


class Nameless(answering(lambda engine, answer: answer.versions.fill(1))):
    """Says that it has no weights yet, and in its answers that it has the first ones."""

    version = property(lambda self: 0, lambda self, version: None)


def careless(*, names=True, newer=True):
    """An engine that looks at less of a stream."""

    class Careless(Small):
        def check(self, found, version):
            super().check(found if names else dict.fromkeys(NAMES), version if newer else self.version + 1)

    return Careless


class Eager(Small):
    def check(self, found, version):
        before, self.version = self.version, version
        if found.keys() != set(NAMES) or version <= before:
            raise EngineError("too late", fix="check first")


class Piecemeal(Small):
    async def update_weights(self, weights, version):
        found = {}
        for name, tensor in weights:
            self.held[name] = found[name] = tensor
        self.check(found, version)
        self.version = version


class Stuck(Small):
    async def update_weights(self, weights, version):
        await super().update_weights(weights, version)
        self.version = 1


class Stubborn(Small):
    async def update_weights(self, weights, version):
        held = self.held
        await super().update_weights(weights, version)
        self.held = held or self.held


class Blind(Small):
    async def generate(self, request):
        known = tuple(token % VOCABULARY for token in request.input_ids)
        return await super().generate(replace(request, input_ids=known))


class Obliging(Small):
    async def generate(self, request):
        return await super().generate(replace(request, want=frozenset()))


class Leaves(ending(lambda engine, answer: engine.stopped)):
    """Says of what it ended when it was stopped that it ended on its own."""

    stopped = False

    async def stop(self):
        self.stopped = True
        await super().stop()


BROKEN = {
    "answers: not done within 60 s": Hangs,
    "stop: not done within 60 s": Lingers,
    "contract-6 has log-probs above 0": answering(lambda engine, answer: answer.log_probs[6:].fill(1)),
    "asked for 1 tokens whatever they are, it draws 2": Chatty,
    "drew all that it was to, and ended by 'stop'": ending(lambda engine, answer: answer.finish_reason == "length"),
    "at temperature 0 the key matters": Heated,
    "the same request among others gives other tokens or log-probs": Crowded,
    "another key gives the same answer": Keyless,
    "at an end that is the first of 1 tokens it draws 1 and says 'length'": ending(
        lambda engine, answer: len(answer.output_ids) == 1, "length"),
    "ends at a stop id after 1 of 6 tokens although ignore_eos": Obedient,
    "aborted, it ended by 'stop'": ending(lambda engine, answer: answer.finish_reason == "abort"),
    "the abort of one request ended another": EndsAll,
    "contract-0 is of weight versions that the engine did not have": answering(
        lambda engine, answer: answer.finish_reason == "abort" and answer.versions.fill(9)),
    "after an abort it answers no more": sulks("abort"),
    r"paused \(retract\), it answers": Deaf,
    r"paused \(retract\), what was under way comes to its end": Closed,
    r"a request that came in the pause \(retract\) got 'abort'": sulks("pause"),
    r"after a pause \(retract\) it ended by 'abort'": rough("retract"),
    r"after a pause \(in_place\) it ended by 'abort'": rough("in_place"),
    "a pause that ends everything ended it by 'stop'": ending(
        lambda engine, answer: answer.finish_reason == "abort" and len(answer.output_ids) > 1),
    "it has been given version 1, and says 0": Nameless,
    "it takes a stream that lacks a tensor": careless(names=False),
    "it takes a stream that is no newer": careless(newer=False),
    "a stream that lacks a tensor changed the version": Eager,
    "a stream that lacks a tensor left traces": Piecemeal,
    "it has been given version 2, and says 1": Stuck,
    "answers do not say the version they are of": answering(lambda engine, answer: answer.versions.fill(1)),
    "new weights answer like the old ones": Stubborn,
    r"it answers Request\(.*input_ids=\(264,\)": Blind,
    r"it answers Request\(.*the_impossible": Obliging,
    "after a request that it refused it answers no more": sulks("refusal"),
    "stopped, it ended by 'stop'": Leaves,
}  # fmt: skip


@pytest.mark.parametrize("words", BROKEN)
def test_an_engine_that_breaks_a_property_is_caught(words, instant):
    with pytest.raises((AssertionError, MilesError), match=words):
        engine_contract(BROKEN[words], weights, vocabulary=VOCABULARY)


def test_a_small_engine_passes_and_one_that_others_disturb_where_that_is_allowed(instant):
    engine_contract(Small, weights, vocabulary=VOCABULARY)
    engine_contract(Crowded, weights, vocabulary=VOCABULARY, exact=False)


@pytest.fixture
def one_thread():
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_local_engine_passes(one_thread):
    from miles_local.engine import LocalEngine
    from safetensors.torch import load_file

    folder = tiny_checkpoint()
    tensors = load_file(folder / "model.safetensors")

    def scaled(version):
        return [(name, tensor * (1 + 0.1 * version)) for name, tensor in tensors.items()]

    engine_contract(lambda: LocalEngine(folder, random_init=True), scaled, vocabulary=VOCABULARY)
