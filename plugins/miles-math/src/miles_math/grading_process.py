"""The program of a grading process: math-verify's verdict on a question is equal, different or label.

math-verify's own timeouts, which are Python's handlers, are off: serving.py bounds the time.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from miles_math.serving import serve

WARM_UP = (("1", "2", True), ("1", "2", False), ("x+1", "1+x", True), ("\\frac{1}{2}", "0.5", True))
"""Questions that import and compile what the first real one should not pay for."""


_CAPITALS = re.compile(r"[A-Z]{2,}")
"""Letters that name things, points or choices, rather than being multiplied: AB is not BA."""
_NUMERIC = re.compile(r"(?:[\d\s.+\-*/^(){}!]|\\(?:d?frac|sqrt|cdot|times|div|left|right))+")
"""The left side of an equation without unknowns, which is right or wrong by itself: 5=6 is no answer 6."""


def usual(text: str) -> str:
    """What math-verify does not read, as it reads it: `42.`, `1e3`, `90\\degree`, `-2 i`."""
    text = re.sub(r"(?<=[^.\s\\])\.$", "", text.strip())
    text = re.sub(r"\^?\\degree(?![a-zA-Z])", r"^\\circ", text)
    text = re.sub(r"(?<=\d)\s+(?=i\b)", "", text)
    scientific = re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d{1,3}", text)
    return f"{Decimal(text):f}" if scientific else text


def equal(answer: str, label: str, *, boxed: bool) -> bool | None:
    """math-verify's verdict; None when the label cannot be parsed.

    Args:
        answer: what a box held, or the end of a response without a box.
        label: the ground truth, bare or in a box or between dollar signs.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    label = usual(label.strip().strip("$"))
    answer = usual(answer) if boxed else answer
    if _CAPITALS.fullmatch(answer) and _CAPITALS.fullmatch(label):
        return answer == label
    statement = answer.rpartition("=") if boxed and "=" not in label else ("", "", "")
    if _NUMERIC.fullmatch(statement[0]) and not equal(statement[0], statement[2], boxed=True):
        return False
    gold = parse(label if "\\boxed" in label else f"\\boxed{{{label}}}", parsing_timeout=None)
    if not gold:
        return None
    plain = [LatexExtractionConfig(boxed_match_priority=-1), ExprExtractionConfig()]
    parsed = (parse(f"\\boxed{{{answer}}}", parsing_timeout=None) if boxed
              else parse(answer, plain, parsing_timeout=None))
    return bool(verify(gold, parsed, timeout_seconds=None))


def word(question: dict[str, Any]) -> str:
    """The answer to a question."""
    try:
        verdict = equal(question["answer"], question["label"], boxed=question["boxed"])
    except Exception:  # noqa: BLE001 - SymPy raises anything; what it cannot compare is not equal
        verdict = False
    return {True: "equal", False: "different", None: "label"}[verdict]


if __name__ == "__main__":
    serve(word, lambda: [equal(answer, label, boxed=boxed) for answer, label, boxed in WARM_UP])
