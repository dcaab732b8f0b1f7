"""The code blocks of the documentation's pages; docs/index.md says what their marks mean, for who writes pages."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MARK = r"(?:^<!-- (?P<mark>file|quoted|not run|hook): (?P<what>[^>]+?) -->\n)?"
BLOCK = re.compile(MARK + r"^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced code block."""

    language: str
    text: str
    mark: str | None
    what: str | None
    line: int


def pages() -> list[Path]:
    """Every page that a person wrote: README and docs/ but for the pages of hooks."""
    found = (ROOT / "docs").rglob("*.md")
    return sorted([ROOT / "README.md", *(path for path in found if path.parent.name != "hooks")])


def blocks(page: Path) -> list[Block]:
    """The code blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [Block(found["language"], found["text"], found["mark"], found["what"], text[: found.start()].count("\n") + 1)
            for found in BLOCK.finditer(text)]


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """(line, words) of each command of a block of shell."""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield line, words


def compare_printed(expected: str, printed: str, where: str) -> None:
    """Each line stands in what was printed, in that order; `...` in a line stands for anything.

    Raises:
        AssertionError: a line that was not printed.
    """
    rest, lines = ([re.sub(r"\s+", " ", line).strip() for line in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()]
                   for text in (printed, expected))
    for line in filter(None, lines):
        wanted = re.compile(re.escape(line).replace(re.escape("..."), ".*"))
        while rest and not wanted.fullmatch(rest[0]):
            rest.pop(0)
        assert rest, f"{where}: nobody printed {line!r} here:\n{printed[-3000:]}"
        rest.pop(0)
