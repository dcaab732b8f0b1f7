"""GSM8K's form of an answer: one number, however it is written, and no other."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from miles_rewards.gsm8k import final_number, gsm8k, normalised

SOLUTION = "She sells 48/2 = <<48/2=24>>24 clips in May.\n#### 72"
NUMBERS = st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-10**9, max_value=10**9)


@pytest.mark.parametrize(("response", "label", "score"), [
    ("so 72 clips\n#### 72", SOLUTION, 1), ("#### 72", "72", 1), ("####72.00", "72", 1), ("#### $1,200", "1200", 1),
    ("#### **-3**", "-3", 1), ("#### .5", "0.50", 1), ("#### 71 #### 72", "72", 1), ("#### -0", "0", 1),
    ("72", "72", 0), ("#### 72 #### none", "72", 0), ("#### 720", "72", 0), ("#### 7.2", "72", 0), ("", "72", 0),
    ("#### 3", "-3", 0), ("#### x = 72", "72", 0),
])  # fmt: skip
def test_scores(response, label, score):
    assert gsm8k(response, label) == score


@given(NUMBERS, NUMBERS)
def test_spellings_are_equal_where_the_numbers_are(one, other):
    assert (normalised(f"{one:,f}") == normalised(f"{other:f}00")) == (one == other)


@given(NUMBERS)
def test_a_solution_ends_in_its_number(number):
    found = final_number(f"#### 1\n#### {number:,f}.")
    assert found is not None and Decimal(found) == number


@given(st.text(alphabet="#0123456789,.-$ *\n", max_size=200))
def test_no_response_is_an_error(response):
    assert gsm8k(response, "72") in (0.0, 1.0)
