"""Rows of files one after the other, from any of them on: for plans, which look at the first, and for streams."""

from __future__ import annotations

import contextlib
import csv
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.errors import DataError
from miles_core.reading import parse_json

if TYPE_CHECKING:
    import pyarrow

Row = dict[str, Any]
Piece = tuple[int, Callable[[], Iterator[Row]]]
"""How many rows, and what reads them."""
BATCH = 1024
"""Rows of Arrow and Parquet that are made at once."""
LARGEST_CELL = 2**31 - 1
"""Characters; the module csv has 131,072 for its bound, which a long document exceeds."""
DELIMITERS = {".csv": ",", ".tsv": "\t"}
KINDS = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json",
         ".ndjson": "json"}
"""By the ending of a file, what reads it."""


def rows(files: Sequence[str], first: int = 0, media: Collection[str] = ()) -> Iterator[Row]:
    """From a row on, counted over all files. Row groups of Parquet that lie before it are not read.

    Args:
        media: columns of bytes that are wanted; see values.rows.

    Raises:
        DataError: a file that is not what its ending says, or whose rows cannot be read one by one.
    """
    for file in files:
        for count, read in _pieces(file, media):
            if count > first:
                yield from itertools.islice(read(), first, None)
            first = max(first - count, 0)


def counted(files: Sequence[str]) -> int | None:
    """Rows of Parquet files, as they say themselves; None of others.

    Raises:
        DataError: a file is no Parquet.
    """
    if not all(file.lower().endswith(".parquet") for file in files):
        return None
    return sum(int(_footer(file).num_rows) for file in files)


def header(file: str) -> list[str]:
    """Names of the columns of a CSV or TSV file.

    Raises:
        DataError: it has no line.
    """
    with _lines(file) as (names, _):
        return names


def columns(file: str, names: Sequence[str]) -> Iterator[dict[str, Sequence[str | None]]]:
    """The cells of these columns of a CSV or TSV file, some BATCH of each at a time.

    Raises:
        DataError: a row with more cells than columns, or other columns than these.
    """
    with _lines(file) as (own, lines):
        if other := set(names).symmetric_difference(own):
            raise DataError("the files have not the same columns", code="data-columns-differ", who=file,
                            got=", ".join(sorted(other)), fix="give them the same first line, or name those that have "
                            "by a pattern")
        while batch := list(itertools.islice(lines, BATCH)):
            yield dict(zip(own, zip(*batch, strict=True), strict=True))


def _pieces(file: str, media: Collection[str]) -> Iterator[Piece]:
    kind = Path(file).suffix.lower()
    if kind == ".parquet":
        yield from _row_groups(file, media)
    elif kind == ".arrow":
        yield from _record_batches(file, media)
    elif kind in DELIMITERS:
        with _lines(file) as (names, lines):
            yield from ((1, partial(_named, names, cells)) for cells in lines)
    else:
        with open(file, "rb") as objects:
            yield from ((1, partial(_object, file, number, line))
                        for number, line in enumerate(objects, 1) if line.strip())


def _row_groups(file: str, media: Collection[str]) -> Iterator[Piece]:
    import pyarrow.parquet

    from miles_datasets.values import rows

    groups = _footer(file)
    with pyarrow.parquet.ParquetFile(file) as opened:

        def group(number: int) -> Iterator[Row]:
            batches = opened.iter_batches(BATCH, row_groups=[number])
            return itertools.chain.from_iterable(rows(batch, media) for batch in batches)

        for number in range(groups.num_row_groups):
            yield groups.row_group(number).num_rows, partial(group, number)


def _record_batches(file: str, media: Collection[str]) -> Iterator[Piece]:
    import pyarrow.ipc

    from miles_datasets.values import rows

    with pyarrow.memory_map(file) as mapped:
        for batch in pyarrow.ipc.open_stream(mapped):  # as the package datasets writes it
            for first in range(0, batch.num_rows, BATCH):
                part = batch.slice(first, BATCH)
                yield part.num_rows, partial(rows, part, media)


def _footer(file: str) -> pyarrow.parquet.FileMetaData:
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_metadata(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError("the file is not Parquet, or not whole", code="parquet-unreadable",
                        got=str(error).splitlines()[0][:200], who=file,
                        fix="fetch or write it again; a pointer of Git LFS is fetched by git lfs pull") from None


@contextlib.contextmanager
def _lines(file: str) -> Iterator[tuple[list[str], Iterator[list[str | None]]]]:
    """The first line of a CSV or TSV file that is not blank, with names as pandas has them, and the lines after it."""
    csv.field_size_limit(LARGEST_CELL)
    with open(file, newline="", encoding="utf-8-sig") as opened:
        begun = itertools.dropwhile(lambda line: not line.strip(" \r\n"), opened)
        lines = csv.reader(begun, delimiter=DELIMITERS[Path(file).suffix.lower()], strict=True)  # no quote left open
        names = [name or f"Unnamed: {place}" for place, name in enumerate(next(lines, ()))]
        if not names:
            raise DataError("the file is empty", code="data-file-empty", who=file,
                            fix="its first line names the columns")
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise DataError("two columns have one name", code="data-column-twice", got=", ".join(twice), who=file,
                            fix="rename one of them")
        yield names, _cells(file, lines, len(names))


def _cells(file: str, lines: Iterator[list[str]], width: int) -> Iterator[list[str | None]]:
    """Of each line that is not blank as many as there are columns, None for those that it lacks."""
    number = 0
    try:
        for cells in lines:
            if len(cells) > width:
                raise DataError("the row has more cells than the first line names", code="data-row-too-wide",
                                got=cells[width:], who=f"{file}, row {number}",
                                fix='put a cell with a delimiter into quotes, "1,000"; end no line with one')
            if len(cells) > 1 or "".join(cells).strip():
                yield [*cells, *[None] * (width - len(cells))]
                number += 1
    except csv.Error as error:
        raise DataError("the row is not CSV", code="data-row-not-csv", got=str(error), who=f"{file}, row {number}",
                        fix='close a cell that begins with a quote by another, and double those within: "a ""b"""'
                        ) from None


def _named(names: list[str], cells: list[str | None]) -> Iterator[Row]:
    yield dict(zip(names, cells, strict=True))


def _object(file: str, number: int, line: bytes) -> Iterator[Row]:
    try:
        row = parse_json(line.strip())
    except ValueError as error:
        raise DataError("the line is not JSON", code="data-line-not-json", got=str(error), who=f"{file}, line {number}",
                        fix="one object a line; a list of objects is read whole, which no stream does") from None
    if not isinstance(row, dict):
        raise DataError("the line is not a JSON object", code="prompt-line-not-json", got=type(row).__name__,
                        who=f"{file}, line {number}",
                        fix="one object a line; a list of objects is read whole, which no stream does")
    yield row
