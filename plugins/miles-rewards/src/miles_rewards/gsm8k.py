"""GSM8K's own form of an answer: a number behind the last "####" (arXiv:2110.14168)."""

from __future__ import annotations

import re

MARK = "####"
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")


def final_number(text: str) -> str | None:
    """The number behind the last mark, without thousands' commas, dollar signs and trailing zeros; None without one."""
    _, mark, behind = text.rpartition(MARK)
    number = re.match(rf"[\s$*]*({_NUMBER.pattern})", behind) if mark else None
    return None if number is None else normalised(number[1])


def normalised(number: str) -> str:
    """One spelling for each number: 1,200.50 and 1200.5 are the same."""
    whole, _, fraction = number.replace(",", "").partition(".")
    sign, digits, fraction = whole[: whole.startswith("-")], whole.lstrip("-").lstrip("0") or "0", fraction.rstrip("0")
    value = digits + (f".{fraction}" if fraction else "")
    return value if value == "0" else sign + value


def gsm8k(response: str, label: str) -> float:
    """1.0 where the number behind the response's last mark is the label's.

    Args:
        label: a number, or a worked solution of the data set, which ends in the mark and one.

    Raises:
        ValueError: the label is neither.
    """
    right = final_number(label if MARK in label else f"{MARK} {label}")
    if right is None:
        raise ValueError(f"the label {label[-60:]!r} does not end in a number")
    return float(final_number(response) == right)
