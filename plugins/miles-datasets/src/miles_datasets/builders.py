"""The package datasets' builders of Arrow files, one for each kind of file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import datasets
import pyarrow
from datasets.builder import Key
from datasets.packaged_modules.arrow.arrow import Arrow
from datasets.packaged_modules.csv.csv import Csv
from datasets.packaged_modules.parquet.parquet import Parquet

from miles_datasets import in_order


class MilesCells(Csv):
    """CSV and TSV as plans and streams read them: cells are text, and a row that is too wide is an error.

    pandas would make numbers of 007, and an index of the first cells where the first row has more than the header.
    """

    def _generate_tables(self, base_files: Sequence[str],
                         files_iterables: object) -> Iterator[tuple[Key, pyarrow.Table]]:
        schema = self.config.features.arrow_schema
        for number, file in enumerate(base_files):
            for place, cells in enumerate(in_order.columns(file, schema.names)):
                yield Key(number, place), pyarrow.table(cells, schema)


def made(kind: str, files: Sequence[str], cache_dir: str | None, digest: str) -> datasets.DatasetBuilder:
    """What makes one table of files, unless it lies in the cache.

    Args:
        kind: parquet, arrow or csv.
        digest: of the files' content. The package itself goes by names and times, which an archive may give to others.
    """
    datasets.disable_progress_bars()
    settings = {"cache_dir": cache_dir, "data_files": {"train": list(files)}, "hash": digest}
    if kind != "csv":
        return {"parquet": Parquet, "arrow": Arrow}[kind](**settings)
    names = dict.fromkeys(in_order.header(files[0]), datasets.Value("string"))
    return MilesCells(features=datasets.Features(names), **settings)
