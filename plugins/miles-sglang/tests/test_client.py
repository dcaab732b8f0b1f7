"""An answer is the same from whichever text of its JSON, and what is no base64 is not made routes of."""

import base64
import json

import numpy as np
import pytest
from miles_sglang.client import Failed, _parsed, parse

ROUTES = np.arange(12, dtype=np.int32)
TEXT = 'says "routed_experts":"AAAA" itself'


def answer(routes: str | None, separators: tuple[str, str]) -> bytes:
    meta = {"id": "a", "finish_reason": {"type": "stop"}, "weight_version": "3", "completion_tokens": 2,
            "output_token_logprobs": [[-0.5, 7, None], [None, 8, None]], "routed_experts": routes, "cached_tokens": 4}
    return json.dumps({"text": TEXT, "output_ids": [7, 8], "meta_info": meta}, separators=separators).encode()


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")], ids=["compact", "spaced"])
@pytest.mark.parametrize("routes", [None, base64.b64encode(ROUTES.tobytes()).decode()], ids=["none", "routes"])
def test_answers_are_read(routes, separators):
    piece = _parsed(answer(routes, separators), 0)
    assert piece.ids.tolist() == [7, 8] and piece.log_probs[0] == -0.5 and np.isnan(piece.log_probs[1])
    assert (piece.rid, piece.reason, piece.version, piece.counts) == ("a", "stop", "3", {"cached_tokens": 4})
    assert piece.experts is None if routes is None else piece.experts.tolist() == ROUTES.tolist()


@pytest.mark.parametrize("routes", ["AAAA!", "AAAAA", "AAAA"], ids=["alphabet", "length", "not whole numbers"])
def test_damaged_routes_are_no_answer(routes):
    with pytest.raises(Failed):
        _parsed(answer(routes, (",", ":")), 0)


@pytest.mark.parametrize("change", [
    {"completion_tokens": 1}, {"output_token_logprobs": [[-0.5], [-0.5]]}, {"finish_reason": "stop"}], ids=str)
def test_an_answer_whose_parts_do_not_fit_is_none(change):
    """Of two ids one that is not counted was left out in silence, and a pair of one number ended the run as it was."""
    body = json.loads(answer(None, (",", ":")))
    body["meta_info"] |= change
    with pytest.raises(Failed):
        parse(body, 0)


@pytest.mark.parametrize("ids", [[7, 2**40], [7, -(2**40)], [[7, 8]], None], ids=str)
def test_ids_that_are_none_are_no_answer(ids):
    with pytest.raises(Failed):
        parse({**json.loads(answer(None, (",", ":"))), "output_ids": ids}, 0)


@pytest.mark.parametrize(("seen", "first"), [(1, 1), (1, 0), (0, 0)], ids=["what is new", "all so far", "the first"])
def test_a_piece_has_all_tokens_so_far_or_the_new_ones(seen, first):
    body = json.loads(answer(None, (",", ":")))
    body["output_ids"], meta = body["output_ids"][first:], body["meta_info"]
    meta["output_token_logprobs"] = meta["output_token_logprobs"][first:]
    assert parse(body, seen).ids.tolist() == [7, 8][seen:]


def test_a_text_that_is_cut_short_is_no_answer():
    with pytest.raises(Failed, match="not JSON"):
        _parsed(answer("AAAA", (",", ":"))[:-30], 0)
