"""The program of a process that compares expressions: "equal" or "different"."""

from __future__ import annotations

from typing import Any

from miles_math.serving import serve

from miles_rewards.symbolic import equal

WARM_UP = (("x+1", "1+x"), (r"\frac{\sqrt{2}}{2}", "1/sqrt(2)"))
"""Comparisons that import and compile what the first real one should not pay for."""


def word(question: dict[str, Any]) -> str:
    """The answer to a question."""
    try:
        return "equal" if equal(question["answer"], question["label"]) else "different"
    except RecursionError:
        return "different"


if __name__ == "__main__":
    serve(word, lambda: [equal(answer, label) for answer, label in WARM_UP])
