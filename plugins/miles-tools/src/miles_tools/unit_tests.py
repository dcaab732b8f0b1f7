"""Scorer unit-tests: the code of an answer against the tests of its prompt, in the sandbox.

A prompt's tests are under a key of its metadata, else in its label, as JSON or text:

    "assert add(1, 2) == 3"                            statements, which see the names of the code: one test
    ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]  one test each
    {"inputs": ["1 2\\n"], "outputs": ["3\\n"]}          programs: what is read, what has to be printed
"""

from __future__ import annotations

import inspect
import re
import secrets
import time
from dataclasses import dataclass

from miles_core.errors import RewardError
from miles_core.types import Sample
from miles_tools import harness
from miles_tools.calls import THINKING_ENDS
from miles_tools.foreign import loads
from miles_tools.sandbox import Outcome, Sandbox, SandboxError, explain

SOURCE = inspect.getsource(harness)
_BLOCK = re.compile(r"^```(?:python|py)?[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Test:
    """One test: a statement, or a program's input and output.

    Args:
        text: the statement, or the input.
        printed: what the program has to print, words apart; None for a statement.
    """

    text: str
    printed: str | None = None


def tests_of(sample: Sample, key: str) -> list[Test]:
    """The tests of a sample's prompt.

    Raises:
        RewardError: there are none, or none of a form that is known.
    """
    tests = sample.prompt.metadata.get(key, sample.prompt.label)
    who = f"unit-tests, {sample.prompt.stream} row {sample.prompt.row}"
    if isinstance(tests, str) and tests.lstrip()[:1] in ("[", "{"):
        try:
            tests = loads(tests)
        except ValueError as error:
            raise RewardError("the tests are not JSON", code="unit-tests-not-json", got=str(error), who=who,
                              fix="correct the row") from None
    if isinstance(tests, str) and tests.strip():
        return [Test(tests)]
    if isinstance(tests, list) and tests and all(isinstance(item, str) for item in tests):
        return [Test(item) for item in tests]
    if isinstance(tests, dict):
        inputs, outputs = tests.get("inputs"), tests.get("outputs")
        if isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs) > 0 and all(
                isinstance(item, str) for item in (*inputs, *outputs)):
            return [Test(*pair) for pair in zip(inputs, outputs, strict=True)]
    raise RewardError("the row has no tests", got=type(tests).__name__ if tests else None, who=who,
                      fix=f'write statements, or {{"inputs": [...], "outputs": [...]}}, under {key!r} of the metadata '
                      "or in the label", code="unit-tests-missing")


def code_of(text: str) -> str:
    """The last block of Python in an answer, reasoning left out; "" without one."""
    blocks = _BLOCK.findall(text.rpartition(THINKING_ENDS)[2])
    return blocks[-1] if blocks else ""


class UnitTests:
    """Scores answers; safe to call for several samples at once.

    Args:
        share: score the share of tests that pass, else 1 for all and 0 otherwise.
        seconds: for all tests of one answer; those that it leaves no time for do not pass.
    """

    def __init__(self, sandbox: Sandbox, key: str, *, share: bool, seconds: float):
        self._sandbox, self._key, self._share, self._seconds = sandbox, key, share, seconds

    async def score(self, sample: Sample) -> float:
        """Between 0 and 1; metadata["unit_tests"] says how many passed and why the first of the others did not.

        Raises:
            RewardError: no tests in the row, or the sandbox failed twice: nothing is known about the answer then.
        """
        tests, code = tests_of(sample, self._key), code_of(sample.text)
        passed, reason = 0, "" if code else "error: the answer has no block of code"
        deadline = time.monotonic() + self._seconds
        for number, test in enumerate(tests if code else (), 1):
            if time.monotonic() >= deadline:
                reason = reason or f"error: {number - 1} tests took {self._seconds:g} s"
                break
            problem = await self._problem(code, test, sample)
            passed += problem is None
            reason = reason or (f"test {number}: {problem}" if problem else "")
            if problem and not self._share:
                break
        sample.metadata["unit_tests"] = {"passed": passed, "of": len(tests), "reason": reason}
        return passed / len(tests) if self._share else float(passed == len(tests))

    async def _problem(self, code: str, test: Test, sample: Sample) -> str | None:
        if test.printed is not None:
            outcome = await self._run(sample, "program", code=code, stdin=test.text)
            printed = outcome.value if isinstance(outcome.value, str) else ""  # code may write another answer itself
            right = outcome.kind == "ok" and printed.split() == test.printed.split()
        else:
            word = secrets.token_hex(16)
            outcome = await self._run(sample, "statement", code=code, test=test.text, passed=word)
            right = outcome.kind == "ok" and outcome.value == word
        if right:
            return None
        return explain(outcome, self._sandbox.limits) if outcome.kind != "ok" else "error: it printed something else"

    async def _run(self, sample: Sample, function: str, **arguments: str) -> Outcome:
        try:
            return await self._sandbox.call(SOURCE, "harness.py", function, arguments)
        except SandboxError:  # a fresh process may do
            pass
        try:
            return await self._sandbox.call(SOURCE, "harness.py", function, arguments)
        except SandboxError as error:
            raise RewardError(f"the sandbox could not run the tests of {sample.name}", code="unit-tests-not-run",
                              got=str(error), who="unit-tests",
                              fix="an untested answer is not counted as wrong: check the sandbox") from error
