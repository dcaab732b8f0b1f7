"""Rows of files one after the other, from any of them on: for plans, which look at the first, and for streams."""

from __future__ import annotations

import csv
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
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
DELIMITERS = {".csv": ",", ".tsv": "\t"}


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
        DataError: it has no line, or its first row more cells than columns: pandas, which refuses such a row anywhere
            else, would take the first cells of all rows for an index, and shift the others.
    """
    with open(file, newline="", encoding="utf-8-sig") as lines:
        names = list(_table(file, lines).fieldnames or ())
    if not names:
        raise DataError("the file is empty", code="data-file-empty", who=file, fix="its first line names the columns")
    next(rows([file]), None)
    return names


def _table(file: str, lines: Iterable[str]) -> csv.DictReader[str]:
    """The rows of a CSV or TSV file, with the names that pandas gives its columns.

    Raises:
        DataError: two have one name; the last would be read here, and the first by pandas.
    """
    begun = itertools.dropwhile(lambda line: not line.strip(" \r\n"), lines)  # pandas passes over blank lines
    table = csv.DictReader(begun, delimiter=DELIMITERS[Path(file).suffix.lower()])
    table.fieldnames = [name or f"Unnamed: {place}" for place, name in enumerate(table.fieldnames or ())]
    if twice := [name for name, count in Counter(table.fieldnames).items() if count > 1]:
        raise DataError("two columns have one name", code="data-column-twice", got=", ".join(twice), who=file,
                        fix="rename one of them")
    return table


def _pieces(file: str, media: Collection[str]) -> Iterator[Piece]:
    kind = Path(file).suffix.lower()
    if kind == ".parquet":
        yield from _row_groups(file, media)
    elif kind == ".arrow":
        yield from _record_batches(file, media)
    elif kind in DELIMITERS:
        with open(file, newline="", encoding="utf-8-sig") as lines:
            yield from ((1, partial(_cells, file, number, row)) for number, row in enumerate(_table(file, lines)))
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


def _cells(file: str, number: int, row: dict[Any, Any]) -> Iterator[Row]:
    if None in row:  # where DictReader puts what it has no name for
        raise DataError("the row has more cells than the first line names", code="data-row-too-wide", got=row[None],
                        who=f"{file}, row {number}",
                        fix='put a cell with a delimiter into quotes, "1,000"; end no line with one')
    yield row


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
