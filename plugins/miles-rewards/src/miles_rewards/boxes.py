r"""The last \boxed{...} as radixark Miles finds it: every brace counts, escaped ones as well; see miles_math.answer for
the other reading."""

from __future__ import annotations

import re

_BRACE = re.compile("[{}]")
_BOX = r"\boxed{"


def last_box(text: str) -> str | None:
    r"""What the last \boxed{...} holds; None without one, where it is never closed, or where no brace follows it."""
    begin = text.rfind(r"\boxed")
    if begin < 0 or not text.startswith(_BOX, begin):
        return None
    inside = begin + len(_BOX)
    depth = 1
    for brace in _BRACE.finditer(text, inside):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[inside : brace.start()]
    return None
