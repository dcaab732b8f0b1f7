"""What others wrote: JSON of a tool, an agent or a model, read so that nothing breaks on it later.

Standard library only: the sandbox's supervisor reads with it, too.
"""

from __future__ import annotations

import json
from typing import Any

DEPTH = 64
"""Levels of lists and objects. Python's own limit depends on how deep the caller already is, so it fails later."""


def loads(text: str | bytes) -> Any:
    """JSON of at most DEPTH levels whose texts are valid Unicode.

    Raises:
        ValueError: anything else, numbers of thousands of digits included.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {DEPTH} levels") from None
    level = [value]
    for _ in range(DEPTH + 1):
        if not all(is_unicode(item) for item in level if isinstance(item, str)):
            raise ValueError("it holds a lone surrogate (\\ud800 to \\udfff), which is not text")
        containers = [item for item in level if isinstance(item, dict | list)]
        if not containers:
            return value
        level = [inner for item in containers
                 for inner in ([*item, *item.values()] if isinstance(item, dict) else item)]
    raise ValueError(f"it is nested deeper than {DEPTH} levels")


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded: it has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def readable(text: str) -> str:
    """The same text with a question mark for every lone surrogate."""
    return text.encode(errors="replace").decode()


def describe(value: object) -> str:
    """Whatever it is, as text that can be printed, cut: an exception's type and words, else its repr."""
    name, failed = type(value).__name__, isinstance(value, BaseException)
    try:
        return readable(f"{name}: {value}"[:1000] if failed else repr(value)[:200])
    except BaseException:  # noqa: BLE001 - a foreign __repr__, or a number of too many digits
        return name if failed else f"{name} that cannot be printed"
