"""Comparing an answer with a label: the obvious cases here, everything else by math-verify in a process of its own.

`10^{100000000}` is one of the answers that keep SymPy busy for ever; processes.py says why that needs a process.
"""

from __future__ import annotations

import re
from pathlib import Path

from miles_core.errors import RewardError
from miles_math.answer import boxed_answer, opens_box, without_end_tokens
from miles_math.processes import Processes

PLAIN_TAIL = 2000
"""Characters at the end of an unboxed response in which its answer is looked for."""

_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")
_PLAIN = re.compile(r"[0-9A-Za-z+\-*/^_(){}\\., ]*[0-9][0-9A-Za-z+\-*/^_(){}\\., ]*")


def obvious(answer: str, label: str, *, boxed: bool) -> bool | None:
    """The library's verdict where it need not be asked: two plain integers, or a box that holds the label's text."""
    answer, label = answer.strip(), label.strip()
    if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(label):
        return int(answer) == int(label)
    return True if boxed and answer == label and _PLAIN.fullmatch(answer) else None


class Grader:
    """Grades responses; safe to call from several threads at once.

    Args:
        timeout: CPU seconds for one comparison.
        processes: how many comparisons may run side by side; a process is started when it is first needed.
    """

    def __init__(self, timeout: float, processes: int):
        self._processes = Processes(Path(__file__).with_name("grading_process.py"), timeout, processes, who="math",
                                    fix="import math_verify by hand to see why; "
                                    "pip install 'math-verify[antlr4-13-2]'")

    def grade(self, response: str, label: str, *, boxed_only: bool = False) -> bool:
        """Whether the answer of a response equals the label.

        Args:
            boxed_only: a response without a box is wrong, whatever it ends with.

        Raises:
            Ungradable: the comparison took too long or too much memory.
            RewardError: the label is nothing that could be compared with.
        """
        answer = boxed_answer(response)
        if answer is not None:
            return bool(answer) and self._compare(answer, label, boxed=True)
        if boxed_only or opens_box(response):
            return False
        return self._compare(without_end_tokens(response)[-PLAIN_TAIL:], label, boxed=False)

    def close(self) -> None:
        """End the processes."""
        self._processes.close()

    def _compare(self, answer: str, label: str, *, boxed: bool) -> bool:
        plain = obvious(answer, label, boxed=boxed) if answer else False
        if plain is not None:
            return plain
        verdict = self._processes.ask({"answer": answer, "label": label, "boxed": boxed})
        if verdict == "label":
            raise RewardError("the label cannot be read as a mathematical expression", got=repr(label), who="math",
                              fix="correct the row, or check --label-key", code="math-label-unreadable")
        return verdict == "equal"
