"""Comparing answers: agreement with math-verify, hostile strings, threads, and the fate of the processes."""

import contextlib
import threading
import time

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from miles_math.answer import boxed_answer
from miles_math.grading import Grader, obvious
from miles_math.grading_process import equal
from miles_math.processes import Ungradable

from miles_core.errors import RewardError


@pytest.fixture(scope="module")
def grader():
    grader = Grader(timeout=3.0, processes=2)
    yield grader
    grader.close()


@pytest.fixture(scope="module")
def lone():
    """A grader with a single process, for the tests that end it: each leaves one, or none, and asks for one."""
    grader = Grader(timeout=1.0, processes=1)
    yield grader
    grader.close()


@pytest.mark.parametrize(
    ("answer", "label", "right"),
    [
        ("46", "46", True),
        ("046", "46", True),
        ("-0", "0", True),
        ("46", "47", False),
        ("46.0", "46", True),
        ("1,234", "1234", True),
        ("1234", "1,234", True),
        ("0.5", r"\frac{1}{2}", True),
        ("1/2", r"$\frac12$", True),
        (r"\frac{2}{4}", r"\boxed{\frac{1}{2}}", True),
        ("x + 1", "1 + x", True),
        ("x + 2", "1 + x", False),
        (r"\{2, 1\}", r"\{1, 2\}", True),
        ("x = 5", "5", True),
        ("12345678901234567", "12345678901234568", False),
        ("", "5", False),
        ("日本", "5", False),
        ("\x00", "5", False),
        ("((((((((", "5", False),
        (r"\frac{1}{", "5", False),
        ("9**9**9", "3", False),
        ("42.", "42", True),
        ("42", "42.", True),
        ("5.", "5", True),
        ("1e3", "1000", True),
        ("1.5e-3", "0.0015", True),
        ("1e3", "1001", False),
        (r"90\degree", "90", True),
        ("90", r"90^\degree", True),
        ("-2i", "-2 i", True),
        ("2i", "-2 i", False),
        ("AB", "BA", False),
        ("AB", "AB", True),
        ("xy", "yx", True),
        ("5=6", "6", False),
        ("2+3=5", "5", True),
        (r"\frac{10}{2}=5", "5", True),
        (r"\theta_1=60", "60", True),
    ],
)
def test_boxed_answers(grader, answer, label, right):
    assert grader.grade(f"so \\boxed{{{answer}}}<|im_end|>", label) is right


@pytest.mark.parametrize(
    ("response", "label", "right"),
    [
        ("46", "46", True),
        ("46<|im_end|>", "46", True),
        ("12+34=46", "46", True),
        ("I think it is 12, no, 46.", "46", True),
        ("I think it is 46, no, 12.", "46", False),
        (r"so $\frac{1}{2}$", "0.5", True),
        (r"\boxed{46", "46", False),
        (r"\boxed{42} then \boxed{46", "46", False),
        (r"\boxed{46} then \boxed{42", "46", False),
        ("no idea", "46", False),
        ("", "46", False),
        ("<|im_end|>", "46", False),
    ],
)
def test_unboxed_answers(grader, response, label, right):
    assert grader.grade(response, label) is right
    assert grader.grade(response, label, boxed_only=True) is False


INTEGERS = st.from_regex(r"-?0{0,1}[0-9]{1,15}", fullmatch=True)
PIECES = [*"0123456789+-/^_()., abxyzAB", "{", "}", "\\frac{1}{2}", "\\sqrt{3}", "\\pi", "\\,", "\\text{ m}"]
EXPRESSIONS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=8).map("".join)


@given(INTEGERS, INTEGERS, st.booleans())
@example("-0", "0", True)
@example("00", "0", True)
@settings(max_examples=60, deadline=None)
def test_integers_are_judged_as_the_library_does(answer, label, same):
    label = answer if same else label
    for boxed in (True, False):
        verdict = obvious(answer, label, boxed=boxed)
        assert verdict is None or verdict is equal(answer, label, boxed=boxed)


@given(EXPRESSIONS)
@example("1/0")
@example("3 m")
@example("12.")
@settings(max_examples=150, deadline=None)
def test_equal_texts_are_judged_as_the_library_does(text):
    assume(boxed_answer(f"\\boxed{{{text}}}") == text)
    if obvious(text, text, boxed=True):
        assert equal(text, text, boxed=True) is True


@pytest.mark.parametrize("answer", ["9^{9^9}", "10^{100000000}", "100000000!", r"\frac{1}{" * 40 + "2" + "}" * 40])
def test_time_is_bounded_and_the_next_answer_is_graded(lone, answer):
    begin = time.monotonic()
    with contextlib.suppress(Ungradable):  # a fast machine may finish in time
        assert lone.grade(f"\\boxed{{{answer}}}", "3") is False
    assert time.monotonic() - begin < 20
    assert lone.grade(r"\boxed{x+1}", "1+x")


def test_other_threads_go_on_during_a_comparison_that_hangs(lone):
    outcome = []

    def hang():
        try:
            outcome.append(lone.grade(r"\boxed{9^{9^{9^9}}}", "3"))
        except Ungradable as error:
            outcome.append(error)

    thread = threading.Thread(target=hang)
    thread.start()
    beats = 0
    while thread.is_alive():
        time.sleep(0.01)
        beats += 1
    thread.join()
    assert isinstance(outcome[0], Ungradable) and beats > 20


def test_many_threads(grader):
    wrong = []

    def work(number):
        for value in range(5):
            if not grader.grade(f"\\boxed{{{number}x+{value}}}", f"{value}+{number}x"):
                wrong.append((number, value))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_process_that_ended_while_idle_is_replaced(lone):
    assert lone.grade(r"\boxed{x+1}", "1+x")
    process = lone._processes._idle.get()
    process._popen.terminate()
    process._popen.wait()
    lone._processes._idle.put(process)
    assert lone.grade(r"\boxed{x+1}", "1+x")


def test_a_label_that_is_no_expression_is_an_error(grader):
    with pytest.raises(RewardError, match="label cannot be read"):
        grader.grade(r"\boxed{x+1}", "$")


def test_close_ends_the_processes(lone):
    lone.grade(r"\boxed{x+1}", "1+x")
    process = lone._processes._idle.get()
    lone._processes._idle.put(process)
    lone.close()
    assert not process.alive()
