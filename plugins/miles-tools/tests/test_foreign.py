"""JSON of strangers: what passes can be encoded, compared and written again, anything else is a ValueError."""

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from miles_tools.calls import parse
from miles_tools.foreign import DEPTH, describe, loads, readable

TEXT = st.text(st.characters(), max_size=5)  # lone surrogates included
VALUES = st.recursive(st.none() | st.booleans() | st.integers() | TEXT,
                      lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3))


@given(VALUES)
def test_what_passes_is_the_same_and_can_be_written(value):
    text = json.dumps(value)
    try:
        read = loads(text)
    except ValueError:
        with pytest.raises(UnicodeEncodeError):
            json.dumps(value, ensure_ascii=False).encode()
        return
    assert read == value and json.dumps(read, ensure_ascii=False).encode()


@given(st.binary(max_size=40) | st.integers(0, 3000).map(lambda depth: b"[" * depth + b"]" * depth)
       | st.integers(4000, 6000).map(lambda digits: b"[" + b"9" * digits + b"]"))
def test_whatever_the_bytes_it_is_a_value_or_a_value_error(data):
    try:
        read = loads(data)
    except ValueError:
        return
    assert copy.deepcopy(read) is not None or read is None


@pytest.mark.parametrize(("depth", "passes"), [(1, True), (DEPTH, True), (DEPTH + 1, False), (900, False)])
def test_depth_is_bounded(depth, passes):
    for opening, inner, closing in (("[", "", "]"), ('{"x":', "1", "}")):
        text = opening * depth + inner + closing * depth
        if passes:
            loads(text)
        else:
            with pytest.raises(ValueError, match="nested deeper than 64"):
                loads(text)


@pytest.mark.parametrize("argument", ["[" * 900 + "]" * 900, '"\\ud800"', "9" * 5000])
def test_a_models_call_that_cannot_be_passed_on_is_answered_as_malformed(argument):
    (call,) = parse(f'<tool_call>{{"name": "f", "arguments": {{"x": {argument}}}}}</tool_call>')[1]
    assert call.error is not None and "not JSON" in call.error


def test_what_cannot_be_shown_is_named_by_its_type():
    assert readable("a\ud800b") == "a?b"
    assert describe("\ud800" * 3) and describe(10**5000).startswith("int") and len(describe("x" * 999)) == 200
