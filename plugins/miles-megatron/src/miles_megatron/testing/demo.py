"""The repository's demo with a family's checkpoint: what the engine decodes is what the trainer trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from miles_core.record.events import read

DIFFERENCE = "train/train_rollout_logprob_abs_diff_max"


class DemoRun(NamedTuple):
    """
    Args:
        steps: metrics of each optimizer step.
        stderr: what the run wrote there.
    """

    steps: list[dict[str, Any]]
    stderr: str

    @property
    def differences(self) -> list[float]:
        """Largest difference of a log-prob between engine and trainer, of each step."""
        return [step[DIFFERENCE] for step in self.steps]


def demo_run(root: Path, checkpoint: Path, at: Path, *flags: str) -> DemoRun:
    """Two rollouts of four prompts, exported to run/hf.

    Args:
        root: the repository, for its examples.
        checkpoint: a Hugging Face folder with the vocabulary of the examples.
        at: where the run directory `run` is made.

    Raises:
        AssertionError: the run ended otherwise than well.
    """
    from miles_testing.forked import miles

    sums = root / "examples" / "arithmetic"
    outcome = miles(["run", str(root / "examples/demo.toml"), "--no-live", "--hf-checkpoint", str(checkpoint),
                     "--prompt-data", str(sums / "train.jsonl"), "--run-dir", "run", "--num-rollout", "2",
                     "--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--eval-interval", "100",
                     "--eval-prompt-data", "sums", str(sums / "eval.jsonl"), "--save-interval", "2", *flags],
                    at)  # fmt: skip
    if outcome.code:
        raise AssertionError(outcome.err)
    metrics = [event["metrics"] for event in read(at / "run" / "events.jsonl") if event["event"] == "metrics"]
    return DemoRun([one for one in metrics if DIFFERENCE in one], outcome.err)
