"""Requests that no server should see. test_engine.py has what becomes of the others."""

import pytest
from miles_sglang.in_flight import check_lengths

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
