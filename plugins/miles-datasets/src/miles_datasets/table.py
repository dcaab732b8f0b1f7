"""Rows that can be asked for by their number: a memory-mapped table for a run, the first ones for a plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from miles_datasets.source import BATCH, Source


class Table:
    """All rows of a source; they lie on disk as Arrow and take no memory but for those that are used."""

    def __init__(self, source: Source):
        self._source, self._table = source, source.table()
        self.data, self.total = source.data, len(self._table)
        self._begin = source.begin

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for first in range(0, self.total, BATCH):
            yield from self._source.rows(self._table[first:first + BATCH], first)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return next(self._source.rows(self._table[row:row + 1], row))

    def where(self, row: int) -> str:
        return self._source.where(row)


class Beginning(list[dict[str, Any]]):
    """The first rows of a source, some `most` bytes of them."""

    data = ""

    def __init__(self, source: Source, most: int):
        super().__init__()
        self._source, self.total, size = source, source.total, 0
        if source.begin is None:  # from an end that is not known
            return
        for table, rows in source.stream():
            for row in rows:
                self.append(row)
            if (size := size + table.nbytes) >= most:
                return
        self.total = len(self)

    def where(self, row: int) -> str:
        return self._source.where(row)
