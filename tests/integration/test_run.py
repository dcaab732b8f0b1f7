"""Whole runs through the real command line."""

import sys
import threading

import pytest
from miles_testing.forked import miles

from miles_core.record.events import read


def test_a_run_trains_and_records_itself(run_file, tmp_path):
    outcome = miles(["run", run_file(), "--no-live", "--run-dir", "runs/a"], tmp_path)
    assert outcome.code == 0, outcome.err
    events = list(read(tmp_path / "runs/a/events.jsonl"))
    metrics = [event for event in events if event["event"] == "metrics"]
    assert [event["rollout_id"] for event in metrics] == [0, 1, 2]
    assert metrics[-1]["metrics"]["rollout/raw_reward"] > metrics[0]["metrics"]["rollout/raw_reward"]
    assert max(event["metrics"]["train/train_rollout_logprob_abs_diff_max"] for event in metrics) <= 1e-5
    syncs = [event for event in events if event["event"] == "weight_sync"]
    assert [event["version"] for event in syncs] == [1, 2, 3, 4], "one before the first rollout and one after each"


def test_epochs_are_rollouts_also_for_the_schedule_of_the_learning_rate(run_file, tmp_path):
    source = tmp_path / "four.jsonl"
    source.write_text('{"prompt": "1+1=", "label": "2"}\n' * 4)
    path = run_file(**{"num_rollout = 3": "num_epoch = 2"})
    for name, rollouts in (("a", "--save-debug-rollout-data"), ("b", "--load-debug-rollout-data")):
        outcome = miles(["run", path, "--no-live", "--run-dir", f"runs/{name}", "--prompt-data", source, "--lr", "1e-3",
                         "--rollout-batch-size", "4", "--num-steps-per-rollout", "2", "--lr-decay-style", "linear",
                         rollouts, "saved/{rollout_id}"], tmp_path)
        assert outcome.code == 0, outcome.err
        rates = [event["metrics"]["train/lr-pg_0"] for event in read(tmp_path / f"runs/{name}/events.jsonl")
                 if event["event"] == "metrics"]
        assert rates == pytest.approx([7.5e-4, 2.5e-4]), rates  # of each rollout's last step


def _environment_watched() -> None:
    def hook(event: str, words: tuple) -> None:
        if event == "os.putenv" and threading.current_thread() is not threading.main_thread():
            with open("added", "ab") as file:
                file.write(words[0] + b"\n")

    sys.addaudithook(hook)


def test_no_thread_beside_the_drivers_adds_to_the_environment(run_file, tmp_path):
    """C code in another thread that looks through it meanwhile would end the process."""
    outcome = miles(["run", run_file(), "--no-live", "--num-rollout", "1"], tmp_path, before=_environment_watched)
    assert outcome.code == 0, outcome.err
    assert not (tmp_path / "added").exists(), (tmp_path / "added").read_text()
