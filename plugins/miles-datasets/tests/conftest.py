"""Prompts of files, with a tokenizer of characters."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from miles_datasets.plugin import Datasets, DatasetsOptions
from miles_datasets.source import Source
from miles_datasets.stream import StreamedPrompts

from miles_core.config.tables import Rollout, RunConfig
from miles_core.reading import format_of
from miles_core.stages.prompts import JsonlRecords, RowPrompts, Rows

sys.path.insert(0, str(Path(__file__).parent))  # formats.py

class Characters:
    """A tokenizer of one token per character, with a template that only brackets."""

    chat_template = "yes"
    name_or_path = "characters"

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [ord(c) for c in text] + ([0] if add_special_tokens else [])}

    def apply_chat_template(self, messages, tokenize, add_generation_prompt, **options):
        text = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return text + ("<assistant>" if add_generation_prompt else "")


@pytest.fixture(autouse=True, scope="session")
def cache(tmp_path_factory):
    """Where the package writes its Arrow files."""
    import datasets.config

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


def read(path, most=None, label_key=None, **options):
    """The rows of a path by the plugin's reader of its ending."""
    plugin = Datasets(DatasetsOptions(**options), RunConfig(rollout=Rollout(label_key=label_key)))
    return getattr(plugin, format_of(str(path)))(str(path), most)


@pytest.fixture(name="read")
def reader():
    """`read`, for tests."""
    return read


@pytest.fixture
def prompts():
    """(path with an optional slice, **changes) -> the prompts of a run; with `stream` read as they are needed."""

    def make(path, *, stream=False, shuffle=False, seed=0, buffer=10_000, **changes):
        values = {"input_key": "q", "label_key": None, "metadata_key": "metadata", "context": 1000, **changes}
        rows = Rows(str(path), **values)
        if stream:
            return StreamedPrompts(rows, Source(rows.path), Characters(), shuffle=shuffle, seed=seed, buffer=buffer)
        records = JsonlRecords(rows.path) if ".jsonl" in rows.path else read(rows.path)
        return RowPrompts(rows, records, Characters(), shuffle=shuffle, seed=seed)

    return make
