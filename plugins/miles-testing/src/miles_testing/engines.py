"""What every engine has to satisfy (stages/rollout.py, Engine).

    from miles_testing import engine_contract

    def test_contract():
        engine_contract(lambda: MyEngine(folder), weights, vocabulary=264)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from miles_core.errors import EngineError
from miles_core.stages.rollout import Engine, Request, Response, SamplingParams, check_response

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds that one check may take."""

LONG = 48
"""Tokens of an answer that is interrupted."""


def engine_contract(make: Callable[[], Engine], weights: Callable[[int], Iterable[tuple[str, torch.Tensor]]], *,
                    vocabulary: int, exact: bool = True) -> None:
    """Every property that an engine has to have.

    Args:
        make: gives an engine that is not started.
        weights: (version) -> a complete stream of weights of that version, which differ from version to version.
        vocabulary: token ids are below it.
        exact: the same request gives the same bits, whatever else runs.

    Raises:
        AssertionError, EngineError: names the property.
    """
    checks = [_answers, _ends, _aborts, _pauses, _updates, _refuses, _stops]
    for check in [*checks, _repeats] if exact else checks:
        asyncio.run(_within(check, make(), weights, vocabulary))


async def _within(check: Callable[..., Any], engine: Engine, weights: Callable[..., Any], vocabulary: int) -> None:
    async def begun() -> None:
        await engine.start()
        await engine.update_weights(weights(1), 1)
        await check(engine, weights, vocabulary)

    try:
        await _bounded(begun(), check.__name__.strip("_"))
    finally:
        await _bounded(engine.stop(), "stop")


async def _bounded(work: Awaitable[None], what: str) -> None:
    try:
        async with asyncio.timeout(PATIENCE):
            await work
    except TimeoutError:
        raise AssertionError(f"{what}: not done within {PATIENCE:g} s") from None


def session(engine: Engine, weights: Iterable[tuple[str, torch.Tensor]], work: Callable[[], Awaitable[T]],
            seconds: float = PATIENCE) -> T:
    """What `work` returns, run while an engine serves these weights as version 1; it is stopped afterwards.

    Raises:
        TimeoutError: all of it has taken `seconds`.
    """
    async def run() -> T:
        async with asyncio.timeout(seconds):
            try:
                await engine.start()
                await engine.update_weights(weights, 1)
                return await work()
            finally:
                await engine.stop()

    return asyncio.run(run())


def request(index: int, vocabulary: int, tokens: int = 6, **sampling: object) -> Request:
    """A request of five tokens; which ones depends on the index."""
    ids = np.random.default_rng(index).integers(0, min(vocabulary, 256), 5).tolist()
    values: dict[str, Any] = {"max_new_tokens": tokens, "ignore_eos": True, **sampling}
    return Request(f"contract-{index}", tuple(ids), SamplingParams(**values), 1000 + index)


async def _answers(engine: Engine, weights: Callable[..., Any], vocabulary: int) -> None:
    """Many requests at once; each gets its own answer, of the version that serves."""
    requests = [request(index, vocabulary, 1 + index % 7) for index in range(12)]
    got = await asyncio.gather(*(engine.generate(one) for one in requests))
    for one, answer in zip(requests, got):
        check_response(one, answer, vocabulary, 1, 1)
        drawn, wanted = len(answer.output_ids), one.sampling.max_new_tokens
        assert drawn == wanted, f"asked for {wanted} tokens whatever they are, it draws {drawn}"
        assert answer.finish_reason == "length", f"it drew all that it was to, and ended by {answer.finish_reason!r}"
    greedy = [request(0, vocabulary, temperature=0.0), replace(request(0, vocabulary, temperature=0.0), id="b", key=9)]
    first, second = [await engine.generate(each) for each in greedy]
    assert first.output_ids.tolist() == second.output_ids.tolist(), "at temperature 0 the key matters"


async def _ends(engine: Engine, weights: Callable[..., Any], vocabulary: int) -> None:
    """An end that is drawn is a stop, also where no further token was to be drawn; `ignore_eos` passes all of them."""
    for tokens in (1, 6):
        one = request(8, vocabulary, tokens, ignore_eos=False, stop_token_ids=tuple(range(vocabulary)))
        answer = await engine.generate(one)
        drawn, reason = len(answer.output_ids), answer.finish_reason
        assert (drawn, reason) == (1, "stop"), (
            f"at an end that is the first of {tokens} tokens it draws {drawn} and says {reason!r}")
        passing = replace(one, sampling=replace(one.sampling, ignore_eos=True))
        drawn = len((await engine.generate(passing)).output_ids)
        assert drawn == tokens, f"it ends at a stop id after {drawn} of {tokens} tokens although ignore_eos is given"


async def _repeats(engine: Engine, weights: Callable[..., Any], vocabulary: int) -> None:
    """A key gives the same tokens and log-probs, alone and among others; another key gives others."""
    requests = [request(index, vocabulary, 8) for index in range(6)]
    alone = [await engine.generate(one) for one in requests]
    together = await asyncio.gather(*(engine.generate(one) for one in requests))
    for one, other in zip(alone, together):
        assert _bits(one) == _bits(other), "the same request among others gives other tokens or log-probs"
    again = await engine.generate(replace(requests[0], id="other", key=77))
    assert _bits(again) != _bits(alone[0]), "another key gives the same answer"


async def _aborts(engine: Engine, weights: Callable[..., Any], vocabulary: int) -> None:
    """An aborted request returns what it has, and no other one does."""
    long, short = request(0, vocabulary, LONG), request(1, vocabulary, 6)
    calls = [asyncio.ensure_future(engine.generate(one)) for one in (long, short)]
    await asyncio.sleep(0)
    await engine.abort([long.id])
    cut, whole = await asyncio.gather(*calls)
    assert cut.finish_reason == "abort" or len(cut.output_ids) == LONG, f"aborted, it ended by {cut.finish_reason!r}"
    assert (whole.finish_reason, len(whole.output_ids)) == ("length", 6), "the abort of one request ended another"
    check_response(long, cut, vocabulary, 1, 1)
    await engine.abort(["nobody"])
    assert len((await engine.generate(short)).output_ids) == 6, "after an abort it answers no more"


async def _pauses(engine: Engine, weights: Callable[..., Any], vocabulary: int) -> None:
    """Paused it draws nothing; resumed it goes on where it was, or has ended everything, as the mode says."""
    for mode in ("retract", "in_place", "abort"):
        call = asyncio.ensure_future(engine.generate(request(2, vocabulary, LONG)))
        await asyncio.sleep(0.005)
        await engine.pause(mode)
        await asyncio.sleep(0.02)  # an answer that is complete may be on its way
        ended = call.done()
        late = asyncio.ensure_future(engine.generate(request(3, vocabulary, 4)))
        await asyncio.sleep(0.05)
        assert not late.done(), f"paused ({mode}), it answers"
        assert mode == "abort" or call.done() == ended, f"paused ({mode}), what was under way comes to its end"
        await engine.resume()
        first, second = await asyncio.gather(call, late)
        assert len(second.output_ids) == 4, f"a request that came in the pause ({mode}) got {second.finish_reason!r}"
        if mode != "abort":
            assert len(first.output_ids) == LONG, f"after a pause ({mode}) it ended by {first.finish_reason!r}"
        else:
            assert first.finish_reason == "abort" or len(first.output_ids) == LONG, (
                f"a pause that ends everything ended it by {first.finish_reason!r}")


async def _updates(engine: Engine, weights: Callable[..., Any], vocabulary: int) -> None:
    """Versions rise; answers say which they are of; a stream that is not whole changes nothing."""
    assert engine.version == 1, f"it has been given version 1, and says {engine.version}"
    before = await engine.generate(request(4, vocabulary))
    for bad, version, what in ((list(weights(2))[:-1], 2, "that lacks a tensor"), (weights(1), 1, "that is no newer")):
        await engine.pause("retract")
        try:
            await engine.update_weights(iter(bad), version)
        except EngineError:
            await engine.resume()
        else:
            raise AssertionError(f"it takes a stream {what}")
        assert engine.version == 1, f"a stream {what} changed the version"
        assert _bits(await engine.generate(request(4, vocabulary))) == _bits(before), f"a stream {what} left traces"
    await engine.pause("retract")
    await engine.update_weights(weights(2), 2)
    await engine.resume()
    after = await engine.generate(request(4, vocabulary))
    assert engine.version == 2, f"it has been given version 2, and says {engine.version}"
    assert set(after.versions.tolist()) == {2}, "answers do not say the version they are of"
    assert _bits(after) != _bits(before), "new weights answer like the old ones"


async def _refuses(engine: Engine, weights: Callable[..., Any], vocabulary: int) -> None:
    """Impossible requests are errors of their own, and the engine goes on."""
    for bad in (replace(request(5, vocabulary), input_ids=(vocabulary,)),
                replace(request(5, vocabulary), want=frozenset({"the_impossible"}))):
        try:
            await engine.generate(bad)
        except EngineError:
            continue
        raise AssertionError(f"it answers {bad}")
    whole = await engine.generate(request(6, vocabulary, 3))
    assert len(whole.output_ids) == 3, "after a request that it refused it answers no more"


async def _stops(engine: Engine, weights: Callable[..., Any], vocabulary: int) -> None:
    """Stopped, requests in flight return as aborted."""
    call = asyncio.ensure_future(engine.generate(request(7, vocabulary, LONG)))
    await asyncio.sleep(0.005)
    await engine.stop()
    got = await call
    assert got.finish_reason == "abort" or len(got.output_ids) == LONG, f"stopped, it ended by {got.finish_reason!r}"


def _bits(answer: Response) -> tuple[Sequence[int], bytes]:
    return answer.output_ids.tolist(), np.asarray(answer.log_probs).tobytes()
