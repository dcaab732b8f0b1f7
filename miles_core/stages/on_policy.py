"""The check behind --true-on-policy-mode: each trained token has one log-prob, whoever computes it, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miles_core.errors import TrainError
from miles_core.types import Sample


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
