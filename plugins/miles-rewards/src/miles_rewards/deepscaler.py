"""The verifier of DeepScaleR: the last box of what follows the thinking equals the label, as text or by SymPy."""

from __future__ import annotations

from pathlib import Path

from miles_math.processes import Processes, Ungradable

from miles_rewards.boxes import last_box
from miles_rewards.hendrycks import canonical

LONGEST = 4000
"""Characters of an answer that SymPy is asked about; a longer one is right where it is the label's text."""


def after_thinking(response: str) -> str | None:
    """What follows the last </think>, or the first ###Response; None without either."""
    if "</think>" in response:
        return response.rpartition("</think>")[2]
    return response.split("###Response")[1] if "###Response" in response else None


def after_channel(response: str) -> str:
    """What follows the last <channel|>, with which Gemma's thinking ends; all of it without one."""
    return response.rpartition("<channel|>")[2]


class Comparison:
    """Compares boxed answers with labels; safe to call from several threads at once.

    Args:
        timeout: CPU seconds for one comparison by SymPy.
        processes: most comparisons by SymPy side by side.
    """

    def __init__(self, timeout: float, processes: int):
        self._processes = Processes(Path(__file__).with_name("symbolic_process.py"), timeout, processes, who="rewards",
                                    fix="import sympy and pylatexenc by hand to see why")

    def right(self, solution: str | None, label: str) -> bool:
        """Whether the last box of a solution holds what the label says, which may stand in a box itself.

        Raises:
            Ungradable: SymPy took too long or too much memory, or is not asked about so long an answer.
        """
        answer = None if solution is None else last_box(solution)
        wanted = last_box(label) if r"\boxed" in label else label
        if answer is None or wanted is None:
            return False
        if answer.strip() == wanted.strip():
            return True
        if len(answer) > LONGEST:
            raise Ungradable(f"more than {LONGEST} characters")
        if canonical(answer) == canonical(wanted):
            return True
        return self._processes.ask({"answer": answer, "label": wanted}) == "equal"

    def close(self) -> None:
        """End the processes."""
        self._processes.close()
