"""The plugin: a reader for each ending, and the prompt source that reads as it goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from miles_core.config import RunConfig, option
from miles_core.errors import ConfigError
from miles_core.hookspecs import hookimpl
from miles_core.reading import format_of

if TYPE_CHECKING:
    from miles_core.stages.prompts import PromptSource, Records


@dataclass(frozen=True, kw_only=True)
class DatasetsOptions:
    """How the rows of other files than JSONL are read."""

    cache_dir: str | None = option(
        None, "Folder of the Arrow files that other formats become; default: HF_DATASETS_CACHE."
    )
    label_after: str | None = option(None, "The label is what follows the last of these marks in it: #### for GSM8K.")
    shuffle_buffer: int = option(
        10_000, "Rows in memory with --prompt-source stream: --rollout-shuffle shuffles within so many.", within=(1,)
    )


class Datasets:
    """Rows of Parquet, Arrow, CSV and JSON files, of folders and of the Hugging Face cache, by the package datasets."""

    def __init__(self, options: DatasetsOptions, config: RunConfig):
        self._options = options
        labels = [config.rollout.label_key, config.eval.eval_label_key,
                  *(dataset.get("label_key") for dataset in config.eval.datasets)]
        self._labels = tuple(sorted({str(key) for key in labels if key}))
        # Bytes that nobody reads would be in every prompt; who reads some names their columns by Miles's flag.
        media: Any = (config.options.get("vision") or {}).get("multimodal_keys") or {}
        self._media = tuple(sorted(map(str, media.values())))
        if options.label_after == "":
            raise ConfigError("datasets.label_after should be a mark", got="nothing", who="datasets.label_after",
                              fix="for instance ####", code="label-mark-empty")
        paths = [path for path in (config.rollout.prompt_data, *(one["path"] for one in config.eval.every)) if path]
        if options.label_after and (jsonl := [path for path in paths if format_of(path) == "jsonl"]):
            raise ConfigError("JSONL is read by the core, which leaves labels as they are", got=jsonl[0],
                              who="datasets.label_after", fix="call it .json, which is read here, also line by line",
                              code="label-mark-unread")

    @hookimpl("read_rows", name="parquet")
    def parquet(self, path: str, most: int | None) -> Records:
        """A file, a folder of that name, or several files by a pattern: data/train-*.parquet."""
        return self._rows(path, most)

    @hookimpl("read_rows", name="arrow")
    def arrow(self, path: str, most: int | None) -> Records:
        """As the package datasets writes it."""
        return self._rows(path, most)

    @hookimpl("read_rows", name="csv")
    def csv(self, path: str, most: int | None) -> Records:
        """With a line of names; every value is text."""
        return self._rows(path, most)

    @hookimpl("read_rows", name="tsv")
    def tsv(self, path: str, most: int | None) -> Records:
        """CSV with tabs."""
        return self._rows(path, most)

    @hookimpl("read_rows", name="json")
    def json(self, path: str, most: int | None) -> Records:
        """A list of objects, or one object a line."""
        return self._rows(path, most)

    @hookimpl("read_rows", name="dataset")
    def dataset(self, path: str, most: int | None) -> Records:
        """A folder with files of these kinds, or ORG/NAME in the Hugging Face cache; [:CONFIG]:SPLIT after it."""
        return self._rows(path, most)

    @hookimpl("prompt_source", name="stream")
    def stream(self, config: RunConfig, tokenizer: Any, read: Callable[[str], Records]) -> PromptSource:
        """Prompts of --prompt-data, read as they are needed: for files larger than memory and disk."""
        from miles_core.stages.prompts import rows_of
        from miles_datasets.source import Source
        from miles_datasets.stream import StreamedPrompts

        rows, options, rollout = rows_of(config), self._options, config.rollout
        source = Source(rows.path, options.cache_dir, self._labels, options.label_after, self._media)
        return StreamedPrompts(rows, source, tokenizer, shuffle=rollout.rollout_shuffle, seed=rollout.rollout_seed,
                               buffer=options.shuffle_buffer)

    def _rows(self, path: str, most: int | None) -> Records:
        from miles_datasets.source import Source
        from miles_datasets.table import Beginning, Listed, Table, is_list

        options = self._options
        source = Source(path, options.cache_dir, self._labels, options.label_after, self._media)
        if source.kind == "json" and (most is None or any(map(is_list, source.files))):
            return Listed(source, most is not None)  # as it is: a table would make times of text, and fill in keys
        return Table(source) if most is None else Beginning(source, most)
