"""Where rows are: the files that a path names, the builder of the package datasets that reads them, what a row is.

Nothing is fetched, and no script of a dataset is run: a name is looked up in the Hugging Face cache of this machine,
and the package refuses a folder whose reader would be a script.
"""

from __future__ import annotations

import contextlib
import csv
import glob
import hashlib
import itertools
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.errors import DataError
from miles_core.reading import format_of, sliced

if TYPE_CHECKING:
    import datasets
    import pyarrow

READERS: dict[str, tuple[str, dict[str, object]]] = {
    "parquet": ("parquet", {}), "arrow": ("arrow", {}), "json": ("json", {}), "jsonl": ("json", {}),
    "csv": ("csv", {"keep_default_na": False}), "tsv": ("csv", {"keep_default_na": False, "sep": "\t"}),
}
"""Ending of a path -> a builder of the package datasets, and its settings."""
BATCH = 1024
"""Rows that are read at once."""
HASHED = 2**30
"""Bytes of files whose whole content tells a dataset from another; of larger ones their first and last MiB."""


class Source:
    """The rows that a path names, from whatever files.

    Args:
        path: FILE, PATTERN or FOLDER, or ORG/NAME in the Hugging Face cache; of a folder or name [:CONFIG]:SPLIT; with
            an optional @[a:b].
        cache_dir: folder of Arrow files; None for the package's.
        labels, label_after: keys whose text is cut down to what follows the last of these marks.

    Raises:
        DataError: nothing is there, it has no such split, or it is not what its ending says.
    """

    def __init__(self, path: str, cache_dir: str | None = None, labels: tuple[str, ...] = (),
                 label_after: str | None = None):
        self.name, self.part = sliced(path)
        self._cut = path.removeprefix(self.name)
        self._cache_dir, self._labels, self._mark = cache_dir, labels, label_after
        with self._explained():
            import datasets

            datasets.disable_progress_bars()
            ending = format_of(path)
            self._builder, self._split = (self._of_folder() if ending == "dataset" else
                                          (self._of_files(ending, _files(self.name, ending)), "train"))
            if not self.files:
                raise DataError("no split is there", who=self.name, fix="name a folder with data files")

    @property
    def files(self) -> list[str]:
        """Those of the split."""
        return [str(file) for file in self._builder.config.data_files[self._split]]

    @cached_property
    def data(self) -> str:
        """Tells one dataset from another."""
        digest, whole = hashlib.sha256(), sum(Path(file).stat().st_size for file in self.files) <= HASHED
        for name in self.files:
            with open(name, "rb") as file:
                if whole:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
                    continue
                size = file.seek(0, 2)
                for place in (0, max(size - 2**20, 0)):
                    file.seek(place)
                    digest.update(b"%d" % size + file.read(2**20))
        return digest.hexdigest()[:16] + self._cut.removeprefix("@")

    @cached_property
    def counted(self) -> int | None:
        """Rows of the files; None where only reading them would tell."""
        if not all(name.endswith(".parquet") for name in self.files):
            return None

        return sum(_footer(file).num_rows for file in self.files)

    @property
    def begin(self) -> int | None:
        """The first row of the slice; None where that depends on how many there are, and this is not known."""
        start = self.part.start or 0
        return start if start >= 0 else None if self.counted is None else max(self.counted + start, 0)

    @property
    def total(self) -> int | None:
        """Rows of the slice, as far as they are known without reading all."""
        return None if self.counted is None else len(range(self.counted)[self.part])

    def where(self, row: int) -> str:
        """How messages refer to a row of the slice: by its number in the files, from 0."""
        return f"{self.name}, row {row + (self.begin or 0)}"

    def table(self) -> datasets.Dataset:
        """All rows of the slice as a memory-mapped table of Arrow, made of the files unless that was done before."""
        with self._explained():
            self._builder.download_and_prepare()
            whole = self._builder.as_dataset(self._split)
            part = range(len(whole))[self.part]
            return self._without_bytes(whole.select(part if part else [])).with_format("arrow")

    def stream(self, row: int = 0) -> Iterator[tuple[pyarrow.Table, Iterator[dict[str, Any]]]]:
        """Batches of rows of the slice from one of them on, read as they are asked for: the Arrow table and its rows.

        Raises:
            DataError: the slice counts from the end of files whose rows nobody has counted.
        """
        stop = self.part.stop if self.counted is None else range(self.counted)[self.part].stop
        if self.begin is None or stop is not None and stop < 0:
            raise DataError("the slice counts from the end, which a stream does not know", got=self._cut, who=self.name,
                            fix="count from the beginning, or leave --prompt-source stream out")
        with self._explained():
            rows = self._builder.as_streaming_dataset(self._split).with_format("arrow")
            rows = rows.skip(self.begin + row)
            rows = rows if stop is None else rows.take(max(stop - self.begin - row, 0))
            for number, table in zip(itertools.count(row, BATCH), rows.iter(BATCH)):
                yield table, self.rows(table, number)

    def rows(self, table: pyarrow.Table, first: int) -> Iterator[dict[str, Any]]:
        """Rows of an Arrow table as JSON would have them; `first` is the number of the first.

        Raises:
            DataError: a label has no mark.
        """
        from miles_datasets.values import rows

        for number, row in enumerate(rows(table), first):
            yield row if self._mark is None else self._marked(row, number, self._mark)

    def _marked(self, row: dict[str, Any], number: int, mark: str) -> dict[str, Any]:
        for key in self._labels:
            if isinstance(text := row.get(key), str):
                _, found, label = text.rpartition(mark)
                if not found:
                    raise DataError(f"the label {key!r} has no {mark}", got=text[-40:], who=self.where(number),
                                    fix="leave the row out, or --datasets.label-after")
                row = {**row, key: label.strip()}
        return row

    def _without_bytes(self, table: datasets.Dataset) -> datasets.Dataset:
        from miles_datasets.values import holds_bytes

        return table.remove_columns([field.name for field in table.features.arrow_schema if holds_bytes(field.type)])

    def _of_files(self, ending: str, files: list[str]) -> datasets.DatasetBuilder:
        import datasets

        kind, settings = READERS[ending]
        if kind == "parquet":
            for file in files:
                _footer(file)
        if kind == "csv":  # text stays what it is: 007 is a label, and 12 no 12.0 because another row has none
            with open(files[0], newline="", encoding="utf-8-sig") as file:
                names = next(csv.reader(file, delimiter="\t" if ending == "tsv" else ","))
            settings = {**settings, "features": datasets.Features(dict.fromkeys(names, datasets.Value("string")))}
        return datasets.load_dataset_builder(kind, data_files=files, cache_dir=self._cache_dir, **settings)

    def _of_folder(self) -> tuple[datasets.DatasetBuilder, str]:
        """
        Raises:
            DataError: no such folder, and no such name in the cache; an unknown configuration or split.
        """
        import datasets

        name, *words = self.name.split(":")
        config, split = words if len(words) == 2 else (None, words[0] if words else None)
        folder = Path(name) if Path(name).is_dir() else _snapshot(name)
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():  # save_to_disk's
            saved = {path.parent.name: path.parent for path in folder.glob("*/state.json")} or {"train": folder}
            split = _split(split, list(saved), self.name)
            return self._of_files("arrow", sorted(map(str, saved[split].glob("*.arrow")))), "train"
        try:
            builder = datasets.load_dataset_builder(str(folder), config, cache_dir=self._cache_dir)
        except ValueError as error:
            what = "the dataset has no such configuration" if config else "the dataset has several configurations"
            raise DataError(what, got=" ".join(str(error).split())[:200], who=self.name,
                            fix=f"write {name}:CONFIG:SPLIT") from None
        return builder, _split(split, [str(one) for one in builder.config.data_files], self.name)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """What the package raises becomes one error that names the data."""
        try:
            yield
        except DataError:
            raise
        except ImportError as error:
            raise DataError("the package that reads it is not installed", got=str(error), who=self.name,
                            fix="pip install datasets pyarrow") from error
        except Exception as error:
            cause = error.__cause__ or error
            said = (str(cause).strip().splitlines() or [""])[0][:200]
            raise DataError("it cannot be read", got=f"{type(cause).__name__}: {said}", who=self.name,
                            fix="write it again, as what its ending says; no script of a dataset is run") from error


def _files(name: str, ending: str) -> list[str]:
    found = [name] if Path(name).is_file() else sorted(
        map(str, Path(name).rglob(f"*.{ending}")) if Path(name).is_dir() else glob.glob(name, recursive=True))
    if not found:
        raise DataError("there is no such prompt file", who=name, fix="check --prompt-data or --eval-prompt-data")
    return found


def _footer(file: str) -> Any:
    """What a Parquet file says of itself.

    Raises:
        DataError: it is none.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_metadata(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError("the file is not Parquet, or not whole", got=str(error).splitlines()[0][:200], who=file,
                        fix="fetch or write it again; a pointer of Git LFS is fetched by git lfs pull") from None


def _snapshot(name: str) -> Path:
    """The folder of a dataset in the Hugging Face cache.

    Raises:
        DataError: it is not there.
    """
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(name, repo_type="dataset", local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError):
        raise DataError("there is no such folder, and no such dataset in the Hugging Face cache; a run fetches nothing",
                        who=name, fix=f"where there is a network: hf download --repo-type dataset {name}; "
                        "a file is named with its ending") from None


def _split(wanted: str | None, there: list[str], name: str) -> str:
    if wanted in there:
        return str(wanted)
    if wanted is None and ("train" in there or len(there) == 1):
        return "train" if "train" in there else there[0]
    raise DataError(f"there is no split {wanted!r}" if wanted else "nobody says which split", who=name,
                    got=f"there are {', '.join(there) or 'none'}", fix=f"write {name.split(':')[0]}:SPLIT")
