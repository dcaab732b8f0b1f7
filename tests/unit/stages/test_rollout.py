"""What an engine may answer, and how long a generator may take."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from miles_testing.clock import run_virtual

from miles_core.errors import EngineError, RolloutError
from miles_core.stages.rollout import Generation, Request, Response, SamplingParams, attended, call_engine
from miles_core.waits import within

REQUEST = Request("train-3-0", (1, 2), SamplingParams(), key=1)
GOOD = Response(np.array([5, 0, 9]), np.array([-1.0, -0.5, 0.0]), np.array([2, 2, 3]), "stop")


class Engine:
    """Has version 2 when asked and 3 when it answers, after some seconds."""

    def __init__(self, response: Response = GOOD, seconds: float = 0.0):
        self.response, self.seconds, self.version = response, seconds, 2

    async def generate(self, request):
        await asyncio.sleep(self.seconds)
        self.version = 3
        return self.response


def generation(engine: Engine, **changes) -> Generation:
    return Generation(engine, SamplingParams(), 1, lambda index, turn: 0, lambda ids, skip: "", timeout=0.2,
                      **{"vocabulary": 10, **changes})


def answered(response: Response, **changes) -> Response:
    return run_virtual(lambda: call_engine(generation(Engine(response), **changes), REQUEST))


def array(*values) -> np.ndarray:
    return np.array(values)


NOTHING = {name: np.zeros(0) for name in ("output_ids", "log_probs", "versions")}


@pytest.mark.parametrize("changes", [
    {}, {"finish_reason": "length"}, {"finish_reason": "abort"}, {**NOTHING, "finish_reason": "abort"},
    {"log_probs": array(-1.0, 1e-6, 0.0)}, {"versions": array(3, 3, 3)}, {"versions": array(2, 2, 2)},
], ids=["good", "cut", "aborted", "aborted before it began", "rounded", "new", "old"])  # fmt: skip
def test_answers_that_may_be_trained_on_or_say_that_they_may_not(changes):
    response = replace(GOOD, **changes)
    assert answered(response) is response


@pytest.mark.parametrize(("changes", "words"), [
    ({"output_ids": array(5, 10, 9)}, r"token ids outside the vocabulary of 10 \(got 5 to 10\)"),
    ({"output_ids": array(5, -1, 9)}, r"token ids outside the vocabulary of 10 \(got -1 to 9\)"),
    ({"log_probs": array(-1.0, np.nan, 0.0)}, r"log-probs that are not finite \(got nan\)"),
    ({"log_probs": array(-1.0, -np.inf, 0.0)}, r"log-probs that are not finite \(got -inf\)"),
    ({"log_probs": array(-1.0, 0.1, 0.0)}, r"log-probs above 0 \(got 0.1\)"),
    ({"log_probs": array(-1.0, -0.5)}, r"different lengths \(got 3 tokens, 2 log-probs, 3 versions\)"),
    (NOTHING, r"ended by 'stop' and is empty \(got no token\)"),
    ({"finish_reason": "tired"}, r"finish reason \(got 'tired'\)"),
    ({"versions": array(3, 2, 3)}, r"versions that go backwards \(got \[3, 2, 3\]\)"),
    ({"versions": array(2, 3, 4)}, r"the engine did not have, but versions 2 to 3 \(got 2 to 4\)"),
    ({"versions": array(1, 2, 3)}, r"the engine did not have, but versions 2 to 3 \(got 1 to 3\)"),
    ({"versions": array(-1, -1, -1)}, r"the engine did not have, but versions 2 to 3 \(got -1 to -1\)"),
])  # fmt: skip
def test_an_answer_that_must_not_be_trained_on_is_an_error_that_names_it(changes, words):
    with pytest.raises(EngineError, match=rf"request train-3-0 .*{words}.*\[engine-answer-invalid\]"):
        answered(replace(GOOD, **changes))


def test_without_a_vocabulary_ids_are_only_not_negative():
    assert answered(replace(GOOD, output_ids=array(5, 10**6, 9)), vocabulary=None)
    with pytest.raises(EngineError, match=r"vocabulary .*got -1.*\[engine-answer-invalid\]"):
        answered(replace(GOOD, output_ids=array(5, -1, 9)), vocabulary=None)


def attend(work, seconds: float = 0.0):
    """A generator that does `work` with an engine that takes so long, and may rest for 0.2 s."""
    async def main():
        given = generation(Engine(replace(GOOD, versions=array(3, 3, 3)), seconds))
        async with within(5, lambda: AssertionError("not bounded")):
            return await attended(work(given), given, "generator 'agent', train prompt 3")
    return run_virtual(main)


@pytest.mark.parametrize("turns", [0, 1])
def test_a_generator_that_waits_for_something_else_for_ever_is_named(turns):
    async def work(given):
        for _ in range(turns):
            await call_engine(given, REQUEST)
        await asyncio.sleep(3600)

    with pytest.raises(RolloutError, match="generator 'agent', train prompt 3: .* nor called the engine for 0.2 s"):
        attend(work)


def test_time_in_the_engine_is_not_the_generators():
    """Three calls of 0.15 s each, of which two overlap, and rests between them: more than 0.2 s in all."""
    async def work(given):
        await call_engine(given, REQUEST)
        await asyncio.sleep(0.1)
        second = replace(REQUEST, id="train-3-1")
        await asyncio.gather(call_engine(given, REQUEST), call_engine(given, second))
        await asyncio.sleep(0.1)
        return ["done"]

    assert attend(work, seconds=0.15) == ["done"]


def test_a_call_that_outlives_its_generator_bounds_nothing():
    async def main():
        given = generation(Engine(seconds=0.1))

        async def work():
            calls.append(asyncio.ensure_future(call_engine(given, REQUEST)))
            await asyncio.sleep(0.05)
            return ["done"]

        calls = []
        assert await attended(work(), given, "generator") == ["done"]
        assert (await calls[0]) is GOOD

    run_virtual(main)


@pytest.mark.parametrize(("given", "held"), [(-1, -1), (0, -1), (1, 1), (40, 40)])
def test_top_k_that_is_off_has_one_spelling(given, held):
    assert SamplingParams(top_k=given).top_k == replace(SamplingParams(), top_k=given).top_k == held
