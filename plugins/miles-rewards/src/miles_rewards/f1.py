"""Token F1 of an answer and a label, as SQuAD's evaluation defines it (arXiv:1606.05250, section 6.1)."""

from __future__ import annotations

import re
import string
from collections import Counter

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_WHOLE = (["yes"], ["no"], ["noanswer"])
"""What is right or wrong as a whole: "no" is no part of a longer answer."""


def tokens(text: str) -> list[str]:
    """The words that count: in lower case, without ASCII punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def f1(answer: str, label: str) -> float:
    """The harmonic mean of precision and recall over the two multisets of tokens, 0 to 1."""
    answer_tokens, label_tokens = tokens(answer), tokens(label)
    if answer_tokens != label_tokens and (answer_tokens in _WHOLE or label_tokens in _WHOLE):
        return 0.0
    shared = sum((Counter(answer_tokens) & Counter(label_tokens)).values())
    return 2 * shared / (len(answer_tokens) + len(label_tokens)) if shared else 0.0
