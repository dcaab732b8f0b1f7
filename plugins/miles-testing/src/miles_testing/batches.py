"""Small rollouts for tests of estimators: rewards by group, log-probs and masks as a test wants them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from miles_core.types import Batch, Group, Prompt, Sample, Status


def make_sample(uid: int, index: int, reward: float, mask: Sequence[int] = (1, 1), rollout: int | None = None,
                **columns: Sequence[float]) -> Sample:
    """A finished sample of two prompt tokens and one response token for each entry of `mask`.

    Args:
        columns: further response columns, such as log_probs, ref_log_probs or rollout_log_probs.
    """
    size = len(mask)
    arrays: dict[str, np.ndarray] = {
        "tokens": np.arange(size + 2, dtype=np.int32), "loss_mask": np.array(mask, np.uint8),
        "rollout_log_probs": np.full(size, -1.0, np.float32), "versions": np.ones(size, np.int32),
    }
    arrays.update({name: np.asarray(values, np.float32) for name, values in columns.items()})
    return Sample(Prompt(uid, uid, "", (0, 1)), index, arrays, size, status=Status.COMPLETED, reward=reward,
                  rollout=rollout)


def make_batch(*rewards: Sequence[float], **columns: Any) -> Batch:
    """A group of two-token samples for each list of rewards; `columns` are the same for all of them."""
    return Batch(0, [
        Group(Prompt(uid, uid, "", (0, 1)), [make_sample(uid, i, reward, **columns) for i, reward in enumerate(group)])
        for uid, group in enumerate(rewards)
    ])  # fmt: skip
