"""Multiple choice as GPQA asks it (arXiv:2311.12022): which letter does a response choose, and is it the right one?

Quantifiers of white space are possessive: a response of blanks takes no longer than another.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

LETTERS = string.ascii_uppercase[:8]
"""The letters that may be chosen where a row names neither letters nor choices."""

_SAID = (
    re.compile(r"(?:answer|option|choice)\s*+(?:is|:)?\s*+([A-Z])", re.IGNORECASE),
    re.compile(r"([A-Z])\s*+is\s*+(?:the)?\s*+correct", re.IGNORECASE),
    re.compile(r"final\s*+(?:answer|option)\s*+(?:is|:)?\s*+([A-Z])", re.IGNORECASE),
)
"""How a response says what it chooses. Of each form the first occurrence counts, where its letter may be chosen."""
_ALONE = re.compile(r"\b[A-Z]\b")


def chosen(text: str, letters: Iterable[str]) -> str | None:
    """The letter that a response chooses: by a phrase, else the last capital letter that stands alone."""
    letters = set(letters)
    by_phrase = (match[1].upper() for match in (form.search(text) for form in _SAID) if match)
    alone = reversed(_ALONE.findall(text))
    return next((letter for letter in (*by_phrase, *alone) if letter in letters), None)


def gpqa(response: str, label: object, row: Mapping[str, Any]) -> float:
    """1.0 where the response chooses the right letter; where it chooses none, if it holds the right answer's text.

    Args:
        label: the right letter, the right choice's text, or its number from 0 on.
        row: may hold `choices`, a list or an object of texts; `valid_letters`; `correct_letter`; and the right text as
            `correct_answer` or `answer_text`.

    Raises:
        ValueError: neither the label nor the row says what is right.
    """
    answer, text = response.rpartition("</think>")[2], label.strip() if isinstance(label, str) else ""
    choices = _choices(row.get("choices"))
    letters = [str(letter).upper() for letter in row.get("valid_letters") or ()] or list(
        string.ascii_uppercase[: len(choices)] if choices else LETTERS)
    number = int(label) if isinstance(label, int | float) else -1
    right = letters[number] if 0 <= number < len(letters) else _right_letter(
        row.get("correct_letter"), text, choices, letters)
    texts = [str(row[key]) for key in ("correct_answer", "answer_text") if row.get(key)]
    if not (right or text or texts):
        raise ValueError("neither the label nor the row says which choice is right")
    chosen_letter = chosen(answer, letters)
    if chosen_letter and right:
        return float(chosen_letter == right)
    texts += [text, *(choice for letter, choice in zip(letters, choices) if letter == right)]
    words = _words(answer)
    return float(any(text in words for text in map(_words, texts) if text))


def _choices(given: object) -> list[str]:
    values: Iterable[object] = given.values() if isinstance(given, Mapping) else given or ()  # type: ignore[assignment]
    return [str(value) for value in values]


def _right_letter(given: object, label: str, choices: Sequence[str], letters: Sequence[str]) -> str | None:
    """The letter that is right: as the row names it, as the label, or that of the choice whose text is the label."""
    if isinstance(given, str) and given.strip():
        return given.strip().upper()
    if len(label) == 1 and label.upper() in letters:
        return label.upper()
    if not label:
        return None
    return next((letter for letter, choice in zip(letters, choices) if _words(choice) == _words(label)), None)


def _words(text: str) -> str:
    """Lower-case ASCII letters and digits, one blank for whatever else stands between them."""
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()
