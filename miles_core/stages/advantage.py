"""Stage 6, advantage: rewards (and whatever columns) of a whole rollout become one advantage per response token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miles_core.errors import TrainError
from miles_core.types import Batch


def fill(batch: Batch, values: Sequence[float | np.ndarray], estimator: str) -> dict[str, float]:
    """Write the column `advantages` from an estimator's answer: a number or [R] array per sample.

    Raises:
        TrainError: wrong count, wrong length or not finite; names estimator and sample.
    """
    samples = batch.samples
    if len(values) != len(samples):
        raise TrainError(f"advantage estimator {estimator!r} answered for {len(values)} of {len(samples)} samples",
                         fix="return one number or [R] array for each of batch.samples, in that order")
    for sample, value in zip(samples, values, strict=True):
        array = np.asarray(value, np.float32)
        if array.ndim == 0:
            array = np.full(sample.response_length, array, np.float32)
        if array.shape != (sample.response_length,) or not np.isfinite(array).all():
            raise TrainError(
                f"advantage estimator {estimator!r} gave {sample.name} what is not [R] finite numbers",
                got=f"shape {list(array.shape)} for R = {sample.response_length}",
                fix="look at the rewards of its group",
            )
        sample.columns["advantages"] = array
    kept = np.concatenate([s.columns["advantages"][s.columns["loss_mask"] > 0] for s in samples])
    return {"rollout/advantages": float(kept.mean()) if kept.size else 0.0}
