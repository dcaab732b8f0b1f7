"""Tables of options in Markdown, as docs/flags.md and what surfaces say there have them."""

from __future__ import annotations

import json
from collections.abc import Sequence


def kind(text: str, choices: Sequence[object]) -> str:
    """A type in words: what may be unset has the default none, which says it already."""
    if choices:
        return ", ".join(f"`{choice}`" for choice in choices)
    return " or ".join(part for part in text.split(" | ") if part != "None")


def value(default: object) -> str:
    """A default in a cell of a table."""
    if default is None or default == []:
        return "none"
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"`{cell(default if isinstance(default, str) else json.dumps(default, default=str))}`"


def cell(words: str) -> str:
    """A text that breaks no table."""
    return " ".join(str(words).split()).replace("|", "\\|").replace("<", "&lt;")


def rows(*names: str) -> list[str]:
    """The head of a table."""
    return [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
