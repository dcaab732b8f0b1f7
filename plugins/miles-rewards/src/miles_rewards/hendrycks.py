"""The string form in which the MATH benchmark compares answers (arXiv:2103.03874): what only looks different is equal.

The rules are those of its `is_equiv` as DeepScaleR applies it; their order counts.
"""

from __future__ import annotations

import re

_TEXT = re.compile(r"\\text\{(.+)\}")
_REPLACED = (
    ("\n", ""), (r"\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), (r"\left", ""), (r"\right", ""),
    (r"^{\circ}", ""), (r"^\circ", ""), (r"\$", ""),
)  # fmt: skip
_UNIT = r"\text{ "
_RATIO = re.compile(r"(0|-?[1-9][0-9]*)/(0|-?[1-9][0-9]*)")


class _Irregular(Exception):
    """An answer that the rules do not fit; it is compared as it stands."""


def canonical(answer: str) -> str:
    r"""The string to compare: 1/2, .5 and \dfrac12 are \frac{1}{2}; without units on the right, degrees and "x =".

    What the rules do not fit, such as a \frac without anything behind it, stays as it is.
    """
    answer = answer.strip()
    if match := _TEXT.fullmatch(answer):
        answer = match[1].strip()
    try:
        return _rewritten(answer)
    except _Irregular:
        return answer


def _rewritten(text: str) -> str:
    for old, new in _REPLACED:
        text = text.replace(old, new)
    if text.count(_UNIT) > 1:
        raise _Irregular
    text = text.partition(_UNIT)[0].replace(r"\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    if text[0] == ".":
        text = "0" + text
    name, equals, value = text.partition("=")
    if equals and "=" not in value and len(name) <= 2:  # x = 5
        text = value
    text = _whole_fractions(_whole_roots(text).replace(" ", ""))
    if text == "0.5":
        return r"\frac{1}{2}"
    return _RATIO.sub(r"\\frac{\1}{\2}", text) if _RATIO.fullmatch(text) else text


def _whole_roots(text: str) -> str:
    r"""\sqrt3 is \sqrt{3}."""
    head, *tails = text.split(r"\sqrt")
    if "" in tails:
        raise _Irregular
    return head + "".join(r"\sqrt" + (tail if tail[0] == "{" else f"{{{tail[0]}}}{tail[1:]}") for tail in tails)


def _whole_fractions(text: str) -> str:
    r"""\frac12 is \frac{1}{2}, and so is \frac1{2}; with one that has a single argument nothing is rewritten."""
    head, *tails = text.split(r"\frac")
    parts = [head]
    for tail in tails:
        if not tail:
            raise _Irregular
        if tail[0] == "{":
            parts.append(tail)
        elif len(tail) == 1:
            return text
        else:
            parts.append(f"{{{tail[0]}}}" + (tail[1:] if tail[1] == "{" else f"{{{tail[1]}}}{tail[2:]}"))
    return r"\frac".join(parts)
