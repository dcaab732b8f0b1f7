"""Checks that engine and trainer are the same model: bit for bit, and at all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miles_core.errors import TrainError
from miles_core.types import Sample

FRESH = "train/train_rollout_logprob_abs_diff_fresh"
"""Metric: mean |trainer - engine| before any step, of trained tokens that were drawn from the trainer's weights."""


def check_first(difference: float, limit: float) -> None:
    """Whether engine and trainer can be one model, by the FRESH of the first batch.

    Args:
        limit: nats per token; 0 for none.

    Raises:
        TrainError: the difference is more than rounding to 16, 8 or 4 bits makes.
    """
    if limit and difference > limit:
        raise TrainError(
            "engine and trainer are not the same model: they give the same tokens of the same weights other log-probs",
            got=f"{difference:.3g} nats per token on average", who="the first batch, debug.max_first_logprob_diff "
            f"= {limit:g}",
            fix="compare what each side was built from: --hf-checkpoint, --load, rope and tied head in config.json, a "
                "plugin that changes one side alone; then run once with --check-weight-update-equal. "
                "--max-first-logprob-diff 0 trains nevertheless (docs/debugging.md)",
        )  # fmt: skip


def check_equal(samples: Sequence[Sample]) -> None:
    """Compare the columns `log_probs` (the trainer's) and `rollout_log_probs` (the engine's) where tokens are trained.

    Raises:
        TrainError: at the first token whose two log-probs differ at all, or of which one is NaN.
    """
    for sample in samples:
        trainer, engine = sample.columns["log_probs"], sample.columns["rollout_log_probs"]
        unequal = np.flatnonzero((trainer != engine) & (sample.columns["loss_mask"] > 0))
        if unequal.size:
            first = int(unequal[0])
            raise TrainError(
                f"true_on_policy_mode: {unequal.size} of {sample.response_length} log-probs differ, first at response "
                f"token {first}", got=f"trainer {float(trainer[first])!r}, engine {float(engine[first])!r}",
                who=f"prompt {sample.prompt.uid}, sample {sample.index}",
                fix="look for what changes one side alone: a plugin around the forward pass, other thread counts, "
                    "another build of torch; or leave true_on_policy_mode out",
            )  # fmt: skip
