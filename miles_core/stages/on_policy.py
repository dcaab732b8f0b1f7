"""Checks that engine and trainer are the same model."""

from __future__ import annotations

from miles_core.errors import TrainError

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
            f"= {limit:g}", code="engine-trainer-mismatch",
            fix="compare what each side was built from: --hf-checkpoint, --load, rope and tied head in config.json, a "
                "plugin that changes one side alone; then run once with --check-weight-update-equal. "
                "--max-first-logprob-diff 0 trains nevertheless (docs/debugging.md)",
        )  # fmt: skip
