"""How answers are read."""

import json

import numpy as np
import pytest
from miles_vllm.call import Call
from miles_vllm.client import Answer, Failed, parse

from miles_core.stages.rollout import Request, SamplingParams


def answer(spans, ids=(3, 4), named=None, reason="stop") -> dict:
    drawn = [{"token_id": token, "logprob": -1.5} for token in named or ids]
    return {"choices": [{"token_ids": list(ids), "finish_reason": reason, "weight_versions": spans,
                         "logprobs": {"content": drawn}}]}


def test_versions_are_those_that_the_server_states_for_each_token():
    both = answer([{"version": "default", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": 2}])
    parsed = parse(json.loads(json.dumps(both)), "engine 0")
    assert parsed.versions.tolist() == [0, 3] and parsed.log_probs.tolist() == [-1.5, -1.5]
    empty = {"choices": [{"token_ids": [], "finish_reason": "abort", "weight_versions": None, "logprobs": None}]}
    assert parse(empty, "engine 0").reason == "abort"


@pytest.mark.parametrize("body", [
    None, {}, {"choices": []}, answer(None), answer([{"version": "3", "start": 1, "end": 2}]),
    answer([{"version": "new", "start": 0, "end": 2}]), answer([{"version": "1", "start": 0, "end": 2}], named=(3, 5)),
], ids=["nothing", "no choice", "no answer", "no versions", "a gap", "no number", "log-probs of other tokens"])
def test_what_is_no_answer_may_be_asked_for_again(body):
    with pytest.raises(Failed):
        parse(body, "engine 0")


@pytest.mark.parametrize("end", [2, 700, 2999, 3000])
def test_a_stop_string_across_calls_is_found_with_few_looks(end):
    """Decoding takes as long as there are tokens, and the driver's loop waits for it."""
    ids, looks = np.ones(3000, np.int32), []
    ids[end - 2:end] = 2, 3

    def decode(ids):
        looks.append(len(ids))
        return "".join(chr(48 + token) for token in ids)

    call = Call(Request("a", (1,), SamplingParams(max_new_tokens=3000, stop=("9", "23")), key=1), 4000)
    for part, reason in ((ids[:1], "abort"), (ids[1:], "length")):
        call.take(Answer(part, part.astype(np.float32), part, reason))
    response = call.response(decode)
    assert response.output_ids.tolist() == ids[:end].tolist() and response.finish_reason == "stop" and len(looks) < 20


def test_a_stop_string_that_began_in_an_earlier_request_ends_the_response():
    call = Call(Request("a", (5, 1, 2), SamplingParams(stop=("23",)), key=1, resumed=(1, 2)), 4000)
    call.take(Answer(np.array([3, 4], np.int32), np.zeros(2, np.float32), np.ones(2, np.int32), "length"))
    response = call.response(lambda ids: "".join(chr(48 + token) for token in ids))
    assert response.output_ids.tolist() == [3] and response.text == "3" and response.finish_reason == "stop"


@pytest.mark.parametrize("count", [0, 4], ids=["none", "more than asked for"])
def test_as_many_tokens_as_nobody_asked_for_are_no_answer(count):
    call = Call(Request("a", (5,), SamplingParams(max_new_tokens=3), key=1), 4000)
    with pytest.raises(Failed):
        call.take(Answer(np.ones(count, np.int32), np.zeros(count, np.float32), np.ones(count, np.int32), "stop"))
    assert call.drawn == 0 and call.reason is None
