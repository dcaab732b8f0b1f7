"""Finding answers in responses: nesting, escapes, truncation, end tokens, and time linear in the text."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_math.answer import boxed_answer, boxes, ends_in_its_only_box, opens_box, without_end_tokens


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{46}", "46"),
        (r"\boxed{46}<|im_end|>", "46"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{ \boxed{ \boxed{5} } }", "5"),
        (r"\boxed{x = \boxed{5}}", r"x = \boxed{5}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {7}", "7"),
        ("\\boxed{\n7\n}", "7"),
        (r"\boxed{}", ""),
        (r"\boxed{4", None),
        (r"\boxed{4} and \boxed{5", None),
        (r"\boxed{4 and \boxed{5}", "5"),
        (r"{ \boxed{4}", "4"),
        (r"} \boxed{4}", "4"),
        (r"\boxed{a { b}", None),
        (r"\boxed 4", None),
        (r"boxed{4}", None),
        ("", None),
        ("日本 \\boxed{日本}", "日本"),
        ("\\boxed{4\\", None),
    ],
)
def test_boxed_answer(text, answer):
    assert boxed_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("46<|im_end|>", "46"),
        ("46 <|im_end|>\n<|endoftext|>\n", "46"),
        ("46</s>", "46"),
        ("46<｜end▁of▁sentence｜>", "46"),
        ("46[|endofturn|]", "46"),
        ("46<turn|>\n", "46"),
        ("46[e~[", "46"),
        ("[|x|]", "[|x|]"),
        ("<|im_end|> 46", "<|im_end|> 46"),
        ("3 > 2", "3 > 2"),
        ("a <b>", "a <b>"),
        (">", ">"),
        ("<|im_end|>", ""),
        ("", ""),
    ],
)
def test_without_end_tokens(text, bare):
    assert without_end_tokens(text) == bare


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (r"thus \boxed{4}", True),
        (r"thus $\boxed{4}$.", True),
        (r"thus \[\boxed{4}\]", True),
        (r"**\boxed{\frac{1}{2}}**", True),
        ("\\boxed{4}\n<|im_end|>", True),
        (r"\boxed{4} is it", False),
        (r"\boxed{3} \boxed{4}", False),
        (r"\boxed{\boxed{4}}", False),
        (r"\boxed{3 \boxed{4}", False),
        (r"\boxed{ }", False),
        (r"\boxed{4", False),
        ("4", False),
        ("", False),
    ],
)
def test_ends_in_its_only_box(text, right):
    assert ends_in_its_only_box(text) is right


@given(st.lists(st.sampled_from(["\\boxed{", "{", "}", "\\", "\\{", "\\}", "a", " ", "日"]), max_size=40).map("".join))
@settings(deadline=None)
def test_any_text_is_fine(text):
    for box in boxes(text):
        assert text[box.start :].startswith("\\boxed") and text[box.inside - 1] == "{" and text[box.end - 1] == "}"
    answer = boxed_answer(text)
    assert answer is None or boxes(text)
    assert opens_box(text) or answer is None
    ends_in_its_only_box(text)


@pytest.mark.parametrize("hostile", ["\\boxed{", "{", "}", "\\", "\\boxed{}", "<|a|>", "<", "$", " "])
def test_time_is_bounded(hostile):
    text = hostile * (200_000 // len(hostile))
    begin = time.thread_time()
    for variant in (text, text + "}" * 30_000):
        boxed_answer(variant)
        ends_in_its_only_box(variant)
    assert time.thread_time() - begin < 5
