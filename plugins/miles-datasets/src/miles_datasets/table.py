"""Rows that can be asked for by their number: tables and lists for a run, the first rows for a plan."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from miles_core.errors import DataError
from miles_core.reading import parse_json
from miles_datasets import in_order
from miles_datasets.source import Source

LARGEST = 64 * 1024**2
"""Bytes of the largest list of JSON that a plan reads."""


class Table:
    """All rows of a source; they lie on disk as Arrow and take no memory but for those that are used."""

    def __init__(self, source: Source):
        self._source, self._table = source, source.table()
        self._count = len(self._table)
        self.data, self.total = source.data, source.total

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for first in range(0, self._count, in_order.BATCH):
            yield from self._rows(first, first + in_order.BATCH)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return next(self._rows(row, row + 1))

    def where(self, row: int) -> str:
        return self._source.where(row)

    def _rows(self, first: int, stop: int) -> Iterator[dict[str, Any]]:
        from miles_datasets.values import rows

        return self._source.labelled(rows(self._table[first:stop], self._source.media), first)


class Beginning(list[dict[str, Any]]):
    """The first rows of a source, some `most` bytes of them."""

    data = ""

    def __init__(self, source: Source, most: int):
        super().__init__()
        self._source, self.total = source, source.total
        if source.begin is None or source.total is None and (source.part.stop or 0) < 0:  # from an end nobody knows
            return
        for row in source.stream():
            self.append(row)
            if (most := most - len(json.dumps(row))) <= 0:
                return
        self.total = len(self)

    def where(self, row: int) -> str:
        return self._source.where(row)


class Listed(list[dict[str, Any]]):
    """The rows of lists of JSON, in memory.

    Args:
        plans: whether a file above LARGEST is left unread, and its rows are nobody's to judge.

    Raises:
        DataError: a file is no list of objects.
    """

    def __init__(self, source: Source, plans: bool):
        large = plans and any(Path(file).stat().st_size > LARGEST for file in source.files)
        rows = [] if large else [row for file in source.files for row in listed(file)]
        source.counted = None if large else len(rows)
        super().__init__(source.labelled(rows[source.part], 0))
        self._source, self.data, self.total = source, "" if plans else source.data, None if large else len(self)

    def where(self, row: int) -> str:
        return self._source.where(row)


def listed(file: str) -> list[dict[str, Any]]:
    """The objects of a list, or of lines.

    Raises:
        DataError: it holds something else.
    """
    if not is_list(file):
        return list(in_order.rows([file]))
    try:
        objects = parse_json(Path(file).read_bytes())
    except ValueError as error:
        raise DataError("the file is not JSON", code="data-file-not-json", got=str(error), who=file,
                        fix="fetch or write it again") from None
    for number, row in enumerate(objects):
        if not isinstance(row, dict):
            raise DataError("the row is not an object", got=type(row).__name__, who=f"{file}, row {number}",
                            fix="write a list of objects", code="data-row-not-object")
    return list(objects)


def is_list(file: str) -> bool:
    """Whether a file begins as a list of JSON does."""
    with open(file, "rb") as opened:
        return opened.read(64).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
