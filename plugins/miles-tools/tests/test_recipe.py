"""Whole runs with the generator: a real model draws, a real trainer trains."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from miles_testing.forked import miles

from miles_core.record.events import read
from miles_core.record.samples import read_samples, sample_file

ROOT = Path(__file__).parents[3]


@pytest.fixture
def place(tmp_path):
    for name in ("examples", "plugins"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


@pytest.mark.integration
def test_without_calls_the_samples_are_those_of_single_turn(place):
    drawn = []
    for run, more in (("plain", []), ("tools", ["--plugin", "tools", "--generate", "tools", "--tools.tools", "calc"])):
        argv = ["run", "examples/demo.toml", "--no-live", "--run-dir", f"runs/{run}", "--threads", "1", "--num-rollout",
                "1", "--rollout-batch-size", "8", "--save-hf", "none", "--eval-interval", "none", *more]
        outcome = miles(argv, place)
        assert (outcome.code, outcome.err) == (0, "")
        path = sample_file(place / "runs" / run, "rollout", 0)
        drawn.append([(one["token_ids"], one["log_probs"], one["reward"]) for one in read_samples(path)])
    assert len(drawn[0]) == 64 and drawn[0] == drawn[1]


@pytest.mark.slow
@pytest.mark.integration
def test_the_recipe_learns_to_take_the_calculator(place, monkeypatch):
    monkeypatch.chdir(place)
    examples = ROOT / "plugins" / "miles-tools" / "examples"
    command = Path(sys.executable).with_name("miles")
    subprocess.run([sys.executable, examples / "make_calculator.py"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([command, "run", examples / "calculator.toml", "--no-live"], check=True, stdout=subprocess.DEVNULL)
    events = list(read(place / "runs/calculator/run/events.jsonl"))
    accuracy = [event["metrics"]["eval/products"] for event in events if event["event"] == "eval"]
    calls = [event["metrics"]["rollout/tool_calls"] for event in events if event["event"] == "metrics"]
    assert accuracy[0] < 0.1 and accuracy[-1] > 0.6
    assert calls[0] < 0.6 and calls[-1] > 0.95
    gaps = [event["metrics"]["train/train_rollout_logprob_abs_diff_max"] for event in events
            if event["event"] == "metrics"]
    assert max(gaps) == 0, "the trainer gives every drawn token of every turn the engine's log-prob"
    shutil.rmtree(place / "runs")
