"""Requests that no server should see, and answers to others. test_engine.py has what becomes of the rest."""

import numpy as np
import pytest
from miles_sglang.client import Answer, Failed
from miles_sglang.in_flight import InFlightRequest, ModelFacts, check_lengths

from miles_core.errors import EngineError
from miles_core.stages.rollout import Request, SamplingParams


@pytest.mark.parametrize("prompt, least, most, code", [
    (0, 0, 1, "prompt-exceeds-context"), (8, 0, 1, "prompt-exceeds-context"), (7, 0, 0, "sampling-lengths-invalid"),
    (7, -1, 1, "sampling-lengths-invalid"), (7, 2, 1, "sampling-lengths-invalid"), (7, 1, 1, None), (1, 0, 99, None),
])
def test_lengths_that_no_response_can_have_are_refused(prompt, least, most, code):
    request = Request("train-0", (1,) * prompt, SamplingParams(max_new_tokens=most, min_new_tokens=least), key=1)
    if code is None:
        return check_lengths(request, 8, 7)
    with pytest.raises(EngineError) as refused:
        check_lengths(request, 8, 7)
    assert refused.value.code == code and "request train-0" in str(refused.value)


@pytest.mark.parametrize("count", [0, 4], ids=["none", "more than asked for"])
def test_as_many_tokens_as_nobody_asked_for_are_no_answer(count):
    facts = ModelFacts(vocab=100, stops=frozenset({98}), layers=1, topk=0, context=200, longest=195)
    request = Request("train-0", (5,), SamplingParams(max_new_tokens=3), key=1)
    inflight = InFlightRequest(request, 0, facts, lambda ids, skip: "")
    with pytest.raises(Failed):
        inflight.take([Answer(np.ones(count, np.int32), np.zeros(count, np.float32), "length", "1")], [1])
    assert not len(inflight.ids) and inflight.reason is None
