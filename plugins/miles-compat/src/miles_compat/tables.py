"""Tables of the documentation that are made of the code:   python -m miles_compat.tables README.md ...

In each file, what stands between `<!-- table: NAME -->` and `<!-- end -->` is written anew.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

from miles_compat import points

_PART = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


@cache
def old_words() -> dict[str, dict[str, str]]:
    """Kind of word -> the words as they would be typed -> what the answer has to hold."""
    text = Path(__file__).with_name("old_words.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, str]] = json.loads(text)
    return found


def words() -> list[str]:
    """Every word of older times with what `miles run` says of it today."""
    rows = []
    for kind, entries in old_words().items():
        rows += [f"### {kind}", "", "| word | write |", "|---|---|"]
        rows += [f"| `{word}` | {answer(word)} |" for word in entries] + [""]
    return rows[:-1]


def answer(word: str) -> str:
    """What is said of a word: a script, flags with their values, or the name of a part.

    Raises:
        ValueError: the word is taken, with nothing to say.
    """
    from miles_core.cli.run import SCRIPTS
    from miles_core.config.load import load
    from miles_core.errors import MilesError
    from miles_core.plugins.resolve import resolve

    if word in SCRIPTS:
        return f"`miles run {word}` takes its flags" + "".join(f", with `{flag}`" for flag in SCRIPTS[word])
    try:
        loaded = load(None, word.split())
        resolve(loaded.selected, loaded.config)
    except MilesError as error:
        return _sentence(error.fix or "")
    if loaded.notes:
        return _sentence(loaded.notes[0].partition(": ")[2] or loaded.notes[0])
    raise ValueError(f"{word} is taken, with nothing to say")


def _sentence(text: str) -> str:
    return (text[:1].upper() + text[1:]).replace("|", "/").rstrip(".") + "."


TABLES: dict[str, Callable[[], list[str]]] = {"points": points.table, "counts": points.counts,
                                               "options": points.options, "words": words}


def written(text: str) -> str:
    """A page with its tables as they should be."""
    return _PART.sub(lambda part: f"{part[1]}{chr(10).join(TABLES[part[2]]())}\n{part[3]}", text)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(written(Path(name).read_text(encoding="utf-8")), encoding="utf-8")
