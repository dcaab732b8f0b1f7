"""Files of others: what is damaged, absurd or hostile in them is one error that names the file."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from miles_core.errors import DataError, MilesError

DEPTH = 64
"""Levels of lists and objects in JSON. Python's own limit depends on how deep its caller is, so it would fail later."""


def parse_json(text: str | bytes) -> Any:
    """JSON of at most DEPTH levels whose texts are valid Unicode, so that it can be walked and written again.

    Raises:
        ValueError: anything else, numbers of thousands of digits included; a JSONDecodeError where it is no JSON.
    """
    text = text.decode("utf-8-sig" if text[:1] == b"\xef" else "utf-8") if isinstance(text, bytes) else text
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {DEPTH} levels") from None
    if "\\u" not in text and text.count("[") + text.count("{") <= DEPTH:  # most rows of a data set
        return value
    level = [value]
    for _ in range(DEPTH + 1):
        if any(re.search("[\ud800-\udfff]", text) for text in level if isinstance(text, str)):
            raise ValueError("it holds a lone surrogate (\\ud800 to \\udfff), which is not text")
        containers = [item for item in level if isinstance(item, dict | list)]
        if not containers:
            return value
        level = [inner for item in containers
                 for inner in ([*item, *item.values()] if isinstance(item, dict) else item)]
    raise ValueError(f"it is nested deeper than {DEPTH} levels")


def field_of(record: Mapping[str, Any], key: str) -> Any:
    """What a row has under a key; one with dots that is not there goes into objects.

    Raises:
        KeyError: nothing.
    """
    if key in record:
        return record[key]
    value: Any = record
    for name in key.split("."):
        if not isinstance(value, Mapping):
            raise KeyError(key)
        value = value[name]
    return value


def format_of(path: str) -> str:
    """As what the rows at a path are read: by its ending, which folders and names in a cache ("dataset") have not."""
    name = apart(path)[0]
    if ending := re.search(r"\.([a-z]\w*)$", name, re.IGNORECASE):
        return ending[1].lower()
    return "dataset" if re.search("[/:]", name) or Path(name).is_dir() else "jsonl"


def apart(path: str) -> tuple[str, str]:
    """PATH and [a:b] of PATH@[a:b]; an @ elsewhere in a path is part of a name."""
    name, cut = (*re.split(r"@(?=(?:\[[^@/]*|-?\d*:-?\d*)$)", path, maxsplit=1), "")[:2]
    return name, cut


def sliced(path: str) -> tuple[str, slice]:
    """PATH@[a:b] as the path and the slice of its rows.

    Raises:
        DataError: what follows the @ is no slice.
    """
    name, cut = apart(path)
    if (span := re.fullmatch(r"\[(-?\d*):(-?\d*)\]", cut or "[:]")) is None:
        raise DataError("the slice should have the form @[a:b]", code="slice-malformed", got=cut, who=name,
                        fix="for instance data.jsonl@[0:1000]")
    return name, slice(*(int(edge) if edge else None for edge in span.groups()))


@contextlib.contextmanager
def reading(who: str, kind: type[MilesError] = DataError) -> Iterator[None]:
    """Whatever a file of somebody else raises in this block becomes one error.

    Args:
        who: the file, and the setting that names it; an error of the system names its own.
        kind: of the error; those of ours pass as they are.
    """
    try:
        yield
    except MilesError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:200].encode(errors="replace").decode()
        fix = "check the path and its permissions" if isinstance(error, OSError) else "correct what is named above"
        raise kind("it cannot be read", got=reason, who=getattr(error, "filename", None) or who, fix=fix,
                   code="file-unreadable") from error
