"""The repository's demo with a family's checkpoint: what the engine decodes is what the trainer trains."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from miles_core.plugins.plan import Plan, prepare
from miles_core.record.events import read

if TYPE_CHECKING:
    import numpy as np

    from miles_megatron.testing.parity import Case
    from miles_megatron.testing.ranks import Ranks

DIFFERENCE = "train/train_rollout_logprob_abs_diff_max"

VOCAB = 264
"""Rows of an embedding for the examples' tokenizer."""
_WORDS = {"vocab_size": VOCAB, "pad_token_id": 256, "bos_token_id": None, "eos_token_id": 258}

_GRADIENTS = ("--no-bf16", "--no-use-distributed-optimizer", "--clip-grad", 0, "--lr", 0)


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


def demo_checkpoint(root: Path, case: Case, at: Path, **config: object) -> Path:
    """`at`, with a random checkpoint of a parity case and the examples' tokenizer.

    Args:
        root: the repository, for its examples.
        config: further keys that differ from the case's.
    """
    from miles_megatron.testing.parity import random_model

    random_model(replace(case, config={**case.config, **_WORDS, **config})).save_pretrained(at)
    for file in (root / "examples" / "arithmetic" / "tiny-qwen3").glob("*token*"):
        shutil.copy(file, at)
    return at


def trainer_plan(checkpoint: Path, *flags: object) -> Plan:
    """Of a run that `ranks.batches` fit: GRPO on four prompts of four answers, several micro-batches."""
    words = ("--hf-checkpoint", checkpoint, "--prompt-data", "data/none.jsonl", "--num-rollout", 1,
             "--rollout-batch-size", 4, "--n-samples-per-prompt", 4, "--rollout-max-response-len", 41,
             "--use-dynamic-batch-size", "--max-tokens-per-gpu", 96, "--trainer-host", "process",
             "--disable-rewards-normalization", "--lr", 1e-3, *flags)
    return prepare(None, [str(word) for word in words])


def layout_gradients(checkpoint: Path, one: Ranks, two: Ranks, *flags: object
                     ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The whole gradient of a step by HF name: under the layout of the flags on two ranks, and on one rank."""
    from miles_megatron.testing.ranks import batches

    [batch] = batches(1, vocab=VOCAB)
    _, expected = one.gradients(trainer_plan(checkpoint, *_GRADIENTS), batch)
    plan = trainer_plan(checkpoint, *_GRADIENTS, "--actor-num-gpus-per-node", 2, *flags)
    return two.gradients(plan, batch)[1], expected


def demo_run(root: Path, checkpoint: Path, at: Path, *flags: str) -> DemoRun:
    """Two rollouts of four prompts, evaluated on eight and exported to run/hf.

    Args:
        root: the repository, for its examples.
        checkpoint: a Hugging Face folder with the vocabulary of the examples.
        at: where the run directory `run` is made.

    Raises:
        AssertionError: the run ended otherwise than well.
    """
    from miles_testing.forked import miles

    sums, held_out = root / "examples" / "arithmetic", at / "eval.jsonl"
    held_out.write_text("".join((sums / held_out.name).read_text().splitlines(keepends=True)[:8]))
    outcome = miles(["run", str(root / "examples/demo.toml"), "--no-live", "--hf-checkpoint", str(checkpoint),
                     "--prompt-data", str(sums / "train.jsonl"), "--run-dir", "run", "--num-rollout", "2",
                     "--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--eval-interval", "100",
                     "--eval-prompt-data", "sums", str(held_out), "--save-interval", "2", *flags],
                    at)  # fmt: skip
    if outcome.code:
        raise AssertionError(outcome.err)
    metrics = [event["metrics"] for event in read(at / "run" / "events.jsonl") if event["event"] == "metrics"]
    return DemoRun([one for one in metrics if DIFFERENCE in one], outcome.err)
