"""The second comparison of DeepScaleR, which is that of PRM800K (arXiv:2305.20050): by SymPy, after a normalisation.

SymPy can compute for ever: equal() is called in a process that the kernel ends, see symbolic_process.py.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

_WORDS = ((" or ", " , "), (" and ", " , "), ("million", "*10^6"), ("billion", "*10^9"), ("trillion", "*10^12"))
_UNITS = tuple(re.compile(rf"{unit}(?:es)?s? *(?:\^[0-9]+)?") for unit in (
    "degree", "cm", "centimeter", "meter", "mile", "second", "minute", "hour", "day", "week", "month", "year", "foot",
    "feet", "inch", "yard"))  # fmt: skip
_SIGNS = {"√": "sqrt", "π": "pi", "∞": "inf", "∪": "U", "·": "*", "×": "*"}
_THOUSANDS = re.compile(r"(\d),(\d\d\d)(?=$|\D)")
_RATIO = re.compile(r"-?[0-9]+.?/0*[1-9][0-9]*.?")
_BEYOND = re.compile(r"\^[{(]|\^[0-9]+\^|\^[0-9][0-9]+")
"""Powers that SymPy is not asked about."""
_BRACKETS = "()[]"
NEAR = 1e-7
"""How far from an integer a number may be that counts as one."""


def equal(answer: str, label: str) -> bool:
    """Whether an answer is what the label says; elements of tuples and ends of intervals are compared one by one.

    An answer to an integer has to be that integer, and one to a reduced fraction that fraction: what SymPy could
    evaluate to it is not enough.
    """
    wanted, predicted = normalised(label), normalised(answer)
    if wanted == predicted:
        return True
    if not predicted:
        return False
    wanted_parts, predicted_parts = _elements(wanted), _elements(predicted)
    if len(wanted_parts) != len(predicted_parts):
        return False
    if len(wanted_parts) > 1 and (wanted[0], wanted[-1]) != (predicted[0], predicted[-1]):
        return False
    return all(_same(*pair) for pair in zip(predicted_parts, wanted_parts))


def normalised(text: str) -> str:
    """An expression in lower case that SymPy may be able to read: no markup, units, blanks and braces."""
    if match := re.match(r"\\text\{(.+?)\}$", text):
        text = match[1]
    text = re.sub(r"\\?[%$]", "", text)
    for old, new in _WORDS:
        text = text.replace(old, new)
    for unit in _UNITS:
        text = unit.sub("", text)
    text = re.sub(r"\^ *\\circ", "", text)
    if text[:1] == "{" and text[-1] == "}":
        text = text[1:-1]
    text = re.sub(r",\\! *", "", text)
    if (whole := _integer(text)) is not None:
        text = str(round(whole))
    if "\\" in text:
        text = _plain(text)
    text = re.sub("- *", "-", text)
    text = re.sub("([0-9]) +([0-9])", r"\1+\2", text)  # 7 3/4 is 7+3/4
    text = re.sub("[ {}]", "", text).lower()
    whole = _integer(_without_thousands(text))
    return text if whole is None else str(int(float(text.replace(",", ""))))


def _plain(text: str) -> str:
    """LaTeX as text: \\frac{1}{2} is 1/2. What cannot be read stays."""
    from pylatexenc.latex2text import LatexNodes2Text

    text = text.replace(r"\tfrac", r"\frac").replace(r"\dfrac", r"\frac").replace(r"\frac", r" \frac")  # 7\frac34
    try:
        read = LatexNodes2Text().latex_to_text(text)
    except Exception:  # noqa: BLE001 - a parser of anything that a model writes
        return text
    for sign, name in _SIGNS.items():
        read = read.replace(sign, name)
    return str(read).strip()


def _integer(text: str) -> float | None:
    """The number that a text is, where it is one and hardly differs from an integer."""
    try:
        number = float(text)
        return number if abs(number - round(number)) <= NEAR else None
    except (ValueError, OverflowError):
        return None


def _without_thousands(text: str) -> str:
    """1,234,567 is 1234567; commas that separate elements stay."""
    while (shorter := _THOUSANDS.sub(r"\1\2", text)) != text:
        text = shorter
    return text


def _elements(text: str) -> list[str]:
    """Of a tuple, a list or an interval its elements, else the text itself."""
    text = _without_thousands(text)
    bracketed = len(text) > 2 and text[0] in _BRACKETS and text[-1] in _BRACKETS
    if bracketed and not any(bracket in text[1:-1] for bracket in _BRACKETS):
        return [element.strip() for element in text[1:-1].split(",")]
    return [text] if text else []


def _same(predicted: str, wanted: str) -> bool:
    if _RATIO.fullmatch(predicted) and _RATIO.fullmatch(wanted):
        return predicted == wanted
    if (_integer(_without_thousands(predicted)) is None) != (_integer(_without_thousands(wanted)) is None):
        return False
    return _no_difference(f"({wanted})-({predicted})")


def _no_difference(expression: str) -> bool:
    """Whether SymPy simplifies an expression of at most two letters to 0."""
    letters = {sign for sign in expression.replace("sqrt", "").replace("frac", "") if sign.isalpha()}
    if len(letters) > 2 or _BEYOND.search(expression):
        return False
    import sympy
    from sympy.parsing import sympy_parser

    rules = (_arithmetic, *sympy_parser.standard_transformations, sympy_parser.implicit_multiplication_application)
    try:
        difference = sympy_parser.parse_expr(expression.replace("^", "**"), transformations=rules, global_dict=_names())
        return bool(sympy.simplify(difference) == 0)
    except Exception:  # noqa: BLE001 - SymPy raises anything; what it cannot compare is not equal
        return False


def _arithmetic(tokens: list[tuple[int, str]], _local: object, _global: object) -> list[tuple[int, str]]:
    """The first transformation of SymPy's parser, which refuses what reaches Python itself.

    SymPy's functions evaluate a text that they are given with all of Python's functions, and attributes lead there too.

    Raises:
        ValueError: a text, or an attribute.
    """
    if any(text == "." or "'" in text or '"' in text for _, text in tokens):
        raise ValueError("this is not arithmetic")
    return tokens


@cache
def _names() -> dict[str, Any]:
    """SymPy's names and nothing of Python's: expressions are evaluated, and a model writes them."""
    import sympy

    return {"__builtins__": {}, **{name: getattr(sympy, name) for name in sympy.__all__}}
