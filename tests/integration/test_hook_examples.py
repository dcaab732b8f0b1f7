"""examples/hooks: an auxiliary loss, a clipping and a diagnostic, in one short run of their own run file."""

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch
from miles_testing.forked import miles

from miles_core.record.events import read
from miles_core.stages.gradients import Piece

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "hooks"


def test_the_run_file_does_what_its_plugins_say(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    outcome = miles(["run", FOLDER / "hooks.toml", "--no-live", "--run-dir", "run", "--num-rollout", "2",
                     "--rollout-batch-size", "8"], tmp_path)  # fmt: skip
    assert outcome.code == 0, outcome.err
    events = [event for event in read(tmp_path / "run" / "events.jsonl") if event["event"] == "metrics"]
    for metrics in (event["metrics"] for event in events):
        assert metrics["train/stay_close"] > 0
        total = metrics["train/pg_loss"] + 0.05 * metrics["train/stay_close"]
        assert metrics["train/loss"] == pytest.approx(total, rel=1e-5, abs=1e-7)
    lines = [json.loads(line) for line in (tmp_path / "run" / "samples-moved.jsonl").read_text().splitlines()]
    assert [(line["rollout"], line["step"]) for line in lines] == [
        (rollout, step) for rollout in range(2) for step in range(2) for _ in range(32)]
    for first in range(0, len(lines), 8):
        group = lines[first : first + 8]
        assert len({line["prompt"] for line in group}) == 1
        assert sum(line["advantage"] for line in group) == pytest.approx(0, abs=1e-5)
    assert max(abs(line["ratio"] - 1) for line in lines) > 1e-3 and all(line["ratio"] > 0 for line in lines)
    learnt = [line["ratio"] for line in lines[:32] if line["advantage"] > 0]
    unlearnt = [line["ratio"] for line in lines[:32] if line["advantage"] < 0]
    assert sum(learnt) / len(learnt) > sum(unlearnt) / len(unlearnt), "the first step went where it should"


class OneRank:
    """Gradients of two parameters, the first cut in two pieces, and a copy of the second."""

    model, clip_grad = "actor", 1.0

    def __init__(self):
        def piece(name, grad, weight, counts=True):
            return Piece(name, torch.tensor(grad), torch.tensor(weight), counts)

        self.pieces = [piece("a", [3.0, 0.0], [10.0, 0.0]), piece("a", [0.0, 4.0], [0.0, 0.0]),
                       piece("b", [0.01], [1.0]), piece("b", [0.01], [1.0], counts=False),
                       piece("zero", [1.0], [0.0])]

    def sums(self, values):
        return {name: float(value) for name, value in values.items()}


def test_adaptive_clipping_bounds_each_parameter_by_its_own_norm():
    """a: norm 5 to 0.2 x 10; b: 0.01 is below 0.2 x 1; zero: norm 1 to 0.2 x the floor of 0.001."""
    spec = importlib.util.spec_from_file_location("adaptive_clipping", FOLDER / "adaptive_clipping.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    gradients = OneRank()
    norm = module.AdaptiveClipping(module.ClippingOptions(share=0.2)).clip(gradients)
    assert norm == pytest.approx(math.sqrt(25 + 0.01**2 + 1))
    for piece, expected in zip(gradients.pieces, ([1.2, 0.0], [0.0, 1.6], [0.01], [0.01], [2e-4]), strict=True):
        torch.testing.assert_close(piece.grad, torch.tensor(expected))
