"""Whole runs: Parquet in place of JSONL changes nothing, and a killed run goes on where it was, streamed or not."""

import json
import re
import subprocess
import sys

import pytest
from formats import write
from miles_testing import tiny_checkpoint, toy_run
from miles_testing.tiny import run_file

from miles_core.errors import ConfigError, DataError, MilesError, UnknownPluginError
from miles_core.plugins.plan import prepare


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The rows of the tiny checkpoint's train.jsonl as Parquet."""
    lines = (tiny_checkpoint() / "train.jsonl").read_text().splitlines()
    return write(tmp_path_factory.mktemp("data") / "train.parquet", [json.loads(line) for line in lines])


def sampled(run):
    """Of every answer all that is kept, in order."""
    return [json.loads(line) for file in sorted((run.folder / "samples").glob("rollout_*.jsonl"))
            for line in file.read_text().splitlines()]


def hashes(run):
    """Of every weight and every column of the batches, by rollout."""
    return [{key: event[key] for key in ("rollout_id", "weights", "batch")} for event in run.events
            if event["event"] == "hashes"]


FLAGS = ("--rollout-shuffle", "--debug-determinism")


@pytest.mark.integration
def test_parquet_in_place_of_jsonl_changes_no_sample_and_no_weight(data):
    ours, theirs = (toy_run(flags=[*FLAGS, *flags]) for flags in (("--prompt-data", str(data)), ()))
    assert sampled(ours) == sampled(theirs) and len(sampled(ours)) == 8
    assert hashes(ours) == hashes(theirs) and hashes(ours)


@pytest.mark.full
@pytest.mark.integration
def test_a_stream_is_the_same_run_where_its_window_holds_all_rows(data):
    ours, theirs = (toy_run(flags=[*FLAGS, *flags]) for flags in (
        ("--prompt-data", str(data), "--prompt-source", "stream"), ()))
    assert sampled(ours) == sampled(theirs) and hashes(ours) == hashes(theirs)


@pytest.mark.integration
@pytest.mark.parametrize("source", ["rows", pytest.param("stream", marks=pytest.mark.full)])
def test_a_run_that_was_stopped_goes_on_with_the_prompts_it_would_have_had(data, tmp_path, source):
    flags = [*FLAGS, "--prompt-data", str(data), "--prompt-source", source, "--plugin", "datasets",
             "--datasets.shuffle-buffer", "5", "--eval-interval", "2", "--eval-prompt-data", "sums", f"{data}@[0:2]"]
    saved = str(tmp_path / "checkpoints")
    whole = toy_run(steps=4, flags=flags)
    first = toy_run(steps=4, flags=[*flags, "--save", saved, "--save-interval", "1", "--debug-exit-after-rollout", "2"])
    second = toy_run(steps=4, flags=[*flags, "--load", saved, "--save", saved])
    assert sampled(first) + sampled(second) == sampled(whole) and len(sampled(whole)) == 16
    assert len({sample["row"] for sample in sampled(whole)}) == 8
    assert "eval/sums" in {key for event in whole.events for key in event.get("metrics", ())}


def plan(tmp_path, **options):
    """The plan of a tiny run that names no plugin."""
    path = run_file(tmp_path / "run.toml", [], {}, options, table="rollout")
    return prepare(path)


@pytest.mark.parametrize("key", ["rollout.prompt_data", "eval.eval_prompt_data"])
def test_an_ending_enables_the_plugin(data, tmp_path, key):
    evaluated = {key: [str(data)], "eval.eval_interval": 1}
    made = plan(tmp_path, **(evaluated if key.startswith("eval") else {key: str(data)}))
    assert ("read_rows", "parquet", "datasets") in {(one.hook, one.name, one.plugin) for one in made.choices}
    plain = plan(tmp_path)
    assert not any(one.plugin == "datasets" for one in plain.choices)


def test_a_plan_looks_at_the_rows(data, tmp_path):
    """By the keys that the run reads, and tells of rows that are trained on and evaluated."""
    made = plan(tmp_path, **{"prompt_data": str(data), "eval.eval_prompt_data": ["sums", str(data)],
                             "eval.eval_interval": 1})
    assert any(re.search("64 of the first 64 evaluation prompts are trained on", note) for note in made.notes)
    for options, known in (({"input_key": "question"}, "prompt, label"), ({"label_key": "answer"}, "prompt, label"),
                           ({"apply_chat_template": False}, "--apply-chat-template"),
                           ({"prompt_data": f"{data}@[64:]"}, r"\[64:\]"),
                           ({"prompt_data": str(tmp_path / "none.parquet")}, "none.parquet"),
                           ({"prompt_data": "org/none"}, "hf download")):
        with pytest.raises(DataError, match=known) as caught:
            plan(tmp_path, **{"prompt_data": str(data), **options})
        assert "rollout.prompt_data" in str(caught.value)


def test_without_the_plugin_a_plan_says_what_to_install(data, tmp_path, monkeypatch):
    from miles_core.plugins import scan, select

    there = [one for one in scan.installed() if one.name != "datasets"]
    monkeypatch.setattr(select, "installed", lambda: there)
    with pytest.raises(UnknownPluginError, match="pip install miles-datasets") as caught:
        plan(tmp_path, prompt_data=str(data))
    assert str(data) in str(caught.value) or "prompt_data" in str(caught.value)
    with pytest.raises(MilesError, match="lance"):
        plan(tmp_path, prompt_data=str(data.with_suffix(".lance")))


def test_without_the_packages_it_stands_on_an_error_says_what_to_install(read, data, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.delitem(sys.modules, "miles_datasets.builders", raising=False)
    with pytest.raises(DataError, match="pip install datasets"):
        read(data)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match="pip install datasets"):
        plan(tmp_path, prompt_data=str(data))


def test_a_plan_imports_neither_torch_nor_the_package(data, tmp_path):
    """It looks at the first rows with pyarrow: a stream of the package datasets would import torch."""
    path = run_file(tmp_path / "run.toml", [], {}, {"prompt_data": str(data)}, table="rollout")
    code = ("import sys; from pathlib import Path; from miles_core.plugins.plan import prepare; "
            f"prepare(Path({str(path)!r})); print({{'torch', 'transformers', 'datasets'}} & set(sys.modules))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "set()", done.stderr


def test_a_mark_in_jsonl_is_not_passed_over(data, tmp_path):
    path = data.with_suffix(".jsonl")
    path.write_text('{"question": "2+2?", "answer": "#### 4"}\n')
    with pytest.raises(ConfigError) as caught:
        plan(tmp_path, **{"prompt_data": str(data), "datasets.label_after": "####", "eval.eval_interval": 1,
                          "eval.eval_prompt_data": ["some", str(path)]})
    assert caught.value.code == "label-mark-unread"


def test_a_mark_is_some_text(data, tmp_path):
    with pytest.raises(ConfigError, match="label_after"):
        plan(tmp_path, **{"prompt_data": str(data), "datasets.label_after": ""})
