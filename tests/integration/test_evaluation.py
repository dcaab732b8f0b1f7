"""Evaluation in whole runs: when, on what, with which sampling; repeatable, and without a trace in the training."""

import json

import pytest
from miles_testing.forked import miles

from miles_core.record.events import read
from miles_core.record.samples import read_samples, sample_file

DATASETS = """
[eval]
eval_interval = 2
n_samples_per_eval_prompt = 4

[[eval.datasets]]
name = "short"
path = "{tiny}/eval.jsonl"
temperature = 0.7
max_response_len = 3

[[eval.datasets]]
name = "greedy"
path = "{tiny}/eval.jsonl@[0:4]"
temperature = 0.0
n_samples = 2
rm_type = "dapo"

[perf]"""


def go(argv, folder, name="a"):
    outcome = miles(["run", *argv, "--no-live", "--run-dir", f"runs/{name}"], folder)
    assert outcome.code == 0, outcome.err
    return list(read(folder / f"runs/{name}/events.jsonl"))


def evals(events):
    """(rollout_id, metrics) of every evaluation."""
    return [(event["rollout_id"], event["metrics"]) for event in events if event["event"] == "eval"]


def tokens(folder, name, rollout_id):
    return [one["token_ids"] for one in read_samples(sample_file(folder / "runs/a", f"eval_{name}", rollout_id))]


def test_both_ends_by_interval_each_dataset_its_own_way_and_repeatable(run_file, tiny, tmp_path):
    """A learning rate of 0 keeps the weights, so every evaluation has to draw the same tokens."""
    path = run_file(**{"\n[perf]": DATASETS.format(tiny=tiny)})
    found = evals(go([path, "--lr", "0", "--weight-decay", "0"], tmp_path))
    assert sorted({rollout_id for rollout_id, _ in found}) == [0, 2, 3], "before the first, every second, the last"
    assert len(found) == 6
    short, greedy = ([metrics for _, metrics in found if f"eval/{name}" in metrics] for name in ("short", "greedy"))
    assert all("eval/short-pass@4" in one and one["eval/short/response_len/max"] <= 3 for one in short)
    assert all("eval/greedy-pass@2" in one and "eval/greedy-pass@4" not in one for one in greedy)
    assert all({"eval/greedy/reward/dapo", "eval/greedy/reward/dapo/acc"} <= {*one} for one in greedy), "a scorer's own"
    assert not any("dapo" in name for one in short for name in one)
    assert all(one == short[0] for one in short) and all(one == greedy[0] for one in greedy)

    for name, count in (("short", 8 * 4), ("greedy", 4 * 2)):
        first = tokens(tmp_path, name, 0)
        assert len(first) == count
        assert first == tokens(tmp_path, name, 2) == tokens(tmp_path, name, 3)
    pairs = tokens(tmp_path, "greedy", 0)
    assert pairs[::2] == pairs[1::2], "greedy answers to one prompt differ"
    assert len({json.dumps(one) for one in tokens(tmp_path, "short", 0)}) > 20, "samples share their draws"


TRACKER = '''
"""A tracker with manners so bad that it reseeds every global generator."""
from miles_core import hookimpl


class Tracker:
    """Counts what it is told."""

    @hookimpl
    def metrics(self, rollout_id, values, run_dir):
        import random

        import numpy
        import torch

        random.seed(rollout_id), numpy.random.seed(rollout_id), torch.manual_seed(rollout_id)
        with open(run_dir / "tracked.txt", "a") as file:
            file.write(f"{rollout_id} {len(values)}\\n")
'''


@pytest.mark.full
def test_whoever_watches_training_gives_the_same_bits(run_file, tiny, tmp_path):
    """Evaluations and trackers on or off."""
    (tmp_path / "tracker.py").write_text(TRACKER)
    path = run_file()
    go([path, "--save", "b", "--save-hf", "hf_b"], tmp_path, "b")
    events = go([path, "--save", "a", "--save-hf", "hf_a", "--plugin", tmp_path / "tracker.py", "--eval-interval", "1",
                 "--eval-prompt-data", "sums", f"{tiny}/eval.jsonl", "--debug-determinism"], tmp_path)
    assert [rollout_id for rollout_id, _ in evals(events)] == [0, 1, 2, 3]
    assert len((tmp_path / "runs/a/tracked.txt").read_text().splitlines()) == 3 + 4
    assert (tmp_path / "hf_a/model.safetensors").read_bytes() == (tmp_path / "hf_b/model.safetensors").read_bytes()


def test_no_rollouts_at_all_is_one_evaluation(run_file, tiny, tmp_path):
    data = f"{tiny}/eval.jsonl"
    events = go([run_file(), "--num-rollout", "0", "--eval-interval", "1", "--eval-prompt-data", data], tmp_path)
    [(rollout_id, metrics)] = evals(events)
    assert rollout_id == 0 and metrics["eval/eval"] == pytest.approx(metrics["eval/eval/reward/digits"])
    assert not [event for event in events if event["event"] == "metrics"]


def test_the_first_evaluation_can_be_skipped(run_file, tiny, tmp_path):
    events = go([run_file(), "--num-rollout", "1", "--eval-interval", "5", "--skip-eval-before-train",
                 "--eval-prompt-data", "sums", f"{tiny}/eval.jsonl"], tmp_path)
    assert [rollout_id for rollout_id, _ in evals(events)] == [1]


def test_prompts_that_are_too_long_are_left_out_and_counted(run_file, tiny, tmp_path):
    for name, more in (("train", 2), ("eval", 1)):
        long = {"prompt": [{"role": "user", "content": "1+" * 30}], "label": "30"}
        (tmp_path / f"{name}.jsonl").write_text((tiny / f"{name}.jsonl").read_text() + (json.dumps(long) + "\n") * more)
    events = go([run_file(), "--num-rollout", "1", "--prompt-data", "train.jsonl", "--rollout-max-prompt-len", "32",
                 "--eval-interval", "1", "--eval-prompt-data", "sums", "eval.jsonl"], tmp_path)
    left_out = [event["text"].partition(" longer")[0] for event in events
                if event["event"] == "message" and "left out" in event["text"]]
    assert left_out == ["prompts: left out 2", "sums: left out 1"]
