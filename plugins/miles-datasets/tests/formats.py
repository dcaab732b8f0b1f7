"""Rows in every format that is read."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet


def write(path: Path, rows: list[dict], group: int = 4) -> Path:
    """Rows as a file of the kind that its ending names; `group`: rows of a row group of Parquet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = path.suffix[1:]
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=group)
    elif kind == "arrow":
        table = pyarrow.Table.from_pylist(rows)
        with pyarrow.ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table)
    elif kind in ("csv", "tsv"):
        with path.open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, list(rows[0]), delimiter="\t" if kind == "tsv" else ",")
            table.writeheader()
            table.writerows(rows)
    elif kind == "json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
