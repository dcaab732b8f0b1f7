"""Checks that engine and trainer are the same model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from miles_core.columns import trained
from miles_core.errors import TrainError
from miles_core.types import Sample

FRESH = "train/train_rollout_logprob_abs_diff_fresh"
"""Metric: mean |trainer - engine| before any step, of trained tokens that were drawn from the trainer's weights."""


def mismatch(samples: Sequence[Sample], version: int) -> dict[str, float]:
    """How far the trainer's log-probs are from the engine's before any step; `version` is of the trainer's weights."""
    engine, ours, versions = (trained(samples, name) for name in ("rollout_log_probs", "log_probs", "versions"))
    gap = np.abs(ours - engine)
    if not gap.size:
        return {}
    fresh = gap[(versions == version) & (engine != 0)]  # 0: none, a given answer's
    return {**({"train/train_rollout_logprob_abs_diff_max": float(gap.max()),
                "rollout/rollout_log_probs": float(engine.mean())} if engine.any() else {}),
            **({FRESH: float(fresh.mean())} if fresh.size else {}), "rollout/log_probs": float(ours.mean())}


def check_first(metrics: Mapping[str, float], limit: float) -> bool:
    """Whether engine and trainer can be one model, by the FRESH of the first batch; False where metrics lack it.

    Args:
        limit: nats per token; 0 for none.

    Raises:
        TrainError: the difference is more than rounding to 16, 8 or 4 bits makes.
    """
    if limit and (difference := metrics.get(FRESH, 0.0)) > limit:
        raise TrainError(
            "engine and trainer are not the same model: their log-probs of the same tokens and weights differ",
            code="engine-trainer-mismatch", got=f"{difference:.3g} nats per token on average",
            who=f"the first batch, debug.max_first_logprob_diff = {limit:g}",
            fix="compare what each side was built from: --hf-checkpoint, --load, rope and tied head in config.json, a "
                "plugin that changes only one side; then run once with --check-weight-update-equal. "
                "--max-first-logprob-diff 0 disables this check (docs/debugging.md)")
    return FRESH in metrics
