"""Where rows are: the files that a path names, and what of them is meant.

Nothing is fetched, and no script of a dataset is run: a name is looked up in the Hugging Face cache of this machine,
and the package datasets refuses a folder whose reader would be a script.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import itertools
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from miles_core.errors import DataError
from miles_core.reading import field_of, format_of, parse_json, sliced
from miles_datasets import in_order

if TYPE_CHECKING:
    import datasets

    from miles_datasets.in_order import Row

HASHED = 2**30
"""Bytes of files whose whole content tells a dataset from another; of larger ones their first and last MiB."""


class Source:
    """The rows that a path names.

    Args:
        path: FILE, PATTERN or FOLDER, or ORG/NAME in the Hugging Face cache; of a folder or name [:CONFIG]:SPLIT; with
            an optional @[a:b].
        cache_dir: folder of Arrow files; None for the package's.
        media: columns of bytes that are wanted, as text in base64.
        labels, label_after: keys whose text is cut down to what follows the last of these marks.

    Raises:
        DataError: nothing is there, it has no such split, or it is not what its ending says.
    """

    def __init__(self, path: str, cache_dir: str | None = None, labels: tuple[str, ...] = (),
                 label_after: str | None = None, media: tuple[str, ...] = ()):
        self.name, self.part = sliced(path)
        self._cut, self._ending = path.removeprefix(self.name), format_of(path)
        self._cache_dir, self._labels, self._mark, self.media = cache_dir, labels, label_after, media
        with self._explained():
            self.files = self._of_folder() if self._ending == "dataset" else _files(self.name, self._ending)
            self.kind = self._kind()
            self.counted = in_order.counted(self.files)

    @property
    def data(self) -> str:
        """Tells one dataset from another."""
        return self._digest + self._cut.removeprefix("@")

    @cached_property
    def _digest(self) -> str:
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
        return digest.hexdigest()[:16]

    @property
    def begin(self) -> int | None:
        """The first row of the slice; None where that depends on how many there are, and nobody has counted."""
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
        """All rows of the slice as a memory-mapped table of Arrow, made of the files unless that was done before.

        Raises:
            DataError: the files have no row, of which the package would make no table.
        """
        with self._explained():
            if self.counted == 0 or next(in_order.rows(self.files), None) is None:
                raise DataError("there are no rows", code="data-rows-none", who=self.name,
                                fix="fetch or write the file again")
            from miles_datasets.builders import made
            from miles_datasets.values import holds_bytes

            builder = made(self.kind, self.files, self._cache_dir, self._digest)
            builder.download_and_prepare()
            whole = builder.as_dataset("train")
            self.counted = len(whole)
            part = range(self.counted)[self.part]
            raw = [field.name for field in whole.features.arrow_schema
                   if holds_bytes(field.type) and field.name not in self.media]
            return whole.select(part if part else []).remove_columns(raw).with_format("arrow")

    def stream(self, row: int = 0) -> Iterator[Row]:
        """Rows of the slice from one of them on, read as they are asked for.

        Raises:
            DataError: the slice counts from the end of files whose rows nobody has counted.
        """
        stop = self.part.stop if self.counted is None else range(self.counted)[self.part].stop
        if self.begin is None or stop is not None and stop < 0:
            raise DataError("the slice counts from the end, which a stream does not know", code="stream-slice-from-end",
                            got=self._cut, who=self.name,
                            fix="count from the beginning, or leave --prompt-source stream out")
        left = None if stop is None else max(stop - self.begin - row, 0)
        with self._explained():
            rows = in_order.rows(self.files, self.begin + row, self.media)
            yield from itertools.islice(self.labelled(rows, row), left)

    def labelled(self, rows: Iterable[Row], first: int) -> Iterator[Row]:
        """Rows, the number of the first of which is given, with what follows the mark as their labels.

        Raises:
            DataError: a label has no mark.
        """
        return iter(rows) if self._mark is None else (self._marked(row, number, self._mark)
                                                      for number, row in enumerate(rows, first))

    def _marked(self, row: Row, number: int, mark: str) -> Row:
        for key in self._labels:
            try:
                text = field_of(row, key)
            except KeyError:  # of another dataset
                continue
            if isinstance(text, str):
                _, mark_there, label = text.rpartition(mark)
                if not mark_there:
                    raise DataError(f"the label {key!r} has no {mark}", got=text[-40:], who=self.where(number),
                                    fix="leave the row out, or --datasets.label-after", code="label-mark-missing")
                row = {**row, key: label.strip()}  # a key with dots comes before what lies in objects
        return row

    def _kind(self) -> str:
        """By the ending of the files, what reads them: those of a folder are read as each would be by itself.

        Raises:
            DataError: nothing does.
        """
        kinds = {in_order.KINDS.get(Path(file).suffix.lower()) for file in self.files}
        if len(kinds) != 1 or None in kinds:
            raise DataError("files of this kind are not read", code="data-kind-unread", who=self.name,
                            got=", ".join(sorted({Path(file).name for file in self.files})[:5]),
                            fix="unpack or convert them to Parquet, or name files of one kind: FOLDER/*.parquet")
        return str(kinds.pop())

    @cached_property
    def _of_name(self) -> tuple[datasets.DatasetBuilder, str]:
        """The same of a folder or name.

        Raises:
            DataError: no such folder, and no such name in the cache; an unknown configuration or split.
        """
        import datasets

        name, *words = self.name.split(":")
        config, split = words if len(words) == 2 else (None, words[0] if words else None)
        try:
            builder = datasets.load_dataset_builder(str(_folder(name)), config, cache_dir=self._cache_dir)
        except ValueError as error:
            what = "the dataset has no such configuration" if config else "the dataset has several configurations"
            raise DataError(what, code="data-shard-failed", got=" ".join(str(error).split())[:200], who=self.name,
                            fix=f"write {name}:CONFIG:SPLIT") from None
        return builder, _split(split, [str(one) for one in builder.config.data_files], self.name)

    def _of_folder(self) -> list[str]:
        """The files of a split."""
        name, *words = self.name.split(":")
        folder = _folder(name)
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():  # save_to_disk's
            saved = {path.parent.name: path.parent for path in folder.glob("*/state.json")} or {"train": folder}
            split = _split(words[-1] if words else None, list(saved), self.name)
            state = parse_json((saved[split] / "state.json").read_text(encoding="utf-8"))
            return [str(saved[split] / one["filename"]) for one in state["_data_files"]]  # not what map() leaves there
        builder, split = self._of_name
        return [str(file) for file in builder.config.data_files[split]]

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """What others raise becomes one error that names the data."""
        try:
            yield
        except DataError:
            raise
        except ImportError as error:
            raise DataError("the package that reads it is not installed", got=str(error), who=self.name,
                            fix="pip install datasets pyarrow", code="data-reader-not-installed") from error
        except Exception as error:
            cause = error.__cause__ or error
            if isinstance(cause, DataError):  # as the package wraps those of our readers
                raise cause from None
            message = (str(cause).strip().splitlines() or [""])[0][:200]
            raise DataError("it cannot be read", code="data-unreadable", got=f"{type(cause).__name__}: {message}",
                            who=self.name,
                            fix="write it again, as what its ending says; no script of a dataset is run") from error


def _files(name: str, ending: str) -> list[str]:
    files = [name] if Path(name).is_file() else sorted(
        map(str, Path(name).rglob(f"*.{ending}")) if Path(name).is_dir() else glob.glob(name, recursive=True))
    if not files:
        raise DataError("the prompt file does not exist", code="prompt-file-missing", who=name,
                        fix="check --prompt-data or --eval-prompt-data")
    return files


def _folder(name: str) -> Path:
    """A folder, or that of a dataset in the Hugging Face cache.

    Raises:
        DataError: neither is there.
    """
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(huggingface_hub.snapshot_download(name, repo_type="dataset", local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError):
        raise DataError("there is no such folder, and no such dataset in the Hugging Face cache; a run fetches nothing",
                        who=name, fix=f"where there is a network: hf download --repo-type dataset {name}; "
                        "a file is named with its ending", code="dataset-missing") from None


def _split(wanted: str | None, there: list[str], name: str) -> str:
    if wanted in there:
        return str(wanted)
    if wanted is None and ("train" in there or len(there) == 1):
        return "train" if "train" in there else there[0]
    raise DataError(f"there is no split {wanted!r}" if wanted else "the dataset has several splits",
                    code="dataset-split-unknown", who=name, got=f"there are {', '.join(there) or 'none'}",
                    fix=f"write {name.split(':')[0]}:SPLIT")
