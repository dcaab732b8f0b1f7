"""Estimators of the REINFORCE family that need more than the shared ones of miles_core/stages/advantage.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from miles_grpo.advantage import normalized

from miles_core.stages.advantage import kl_penalties, rollout_rewards, to_samples, token_rewards
from miles_core.types import rollout_keys

if TYPE_CHECKING:
    from miles_core.config.tables import Algorithm
    from miles_core.types import Batch


def token_returns(batch: Batch, algorithm: Algorithm) -> list[np.ndarray]:
    """REINFORCE++ (arXiv:2501.03262, section 3): A_t = G_t, the return from token t on.

        u_t = -kl_coef KL_t, and the reward on top at the last trained token
        G_t = u_t + gamma G_{t+1}

    The paper whitens the result over the batch, which is the core's `normalize_advantages`.

    Returns:
        [R] float64 per sample.
    """
    return [discounted(rewards, algorithm.gamma) for rewards in token_rewards(batch, algorithm)]


def discounted(rewards: np.ndarray, gamma: float) -> np.ndarray:
    """Returns G_t = u_t + gamma G_{t+1} of [R] rewards, [R] float64."""
    returns, following = np.empty(len(rewards)), 0.0
    for t in range(len(rewards) - 1, -1, -1):
        returns[t] = following = float(rewards[t]) + gamma * following
    return returns


def leave_one_out(batch: Batch, algorithm: Algorithm) -> list[float]:
    """RLOO (arXiv:2402.14740, section 2.2): the baseline of a rollout is the mean reward of the n - 1 others.

        A_i = R_i - sum_{j != i} R_j / (n - 1) = (R_i - mean(R)) n / (n - 1)
        R_i = r_i - kl_coef x sum over the rollout's trained tokens of KL_t

    A group of one is 0. Without `rewards_normalization` it is R_i.
    """
    penalties, values = iter(kl_penalties(batch, algorithm)), []
    for group in batch.groups:
        rewards = rollout_rewards(group)
        for key in rollout_keys(group):
            rewards[key] += float(next(penalties).sum())
        if algorithm.rewards_normalization:
            size = len(rewards)
            centred = normalized(list(rewards.values()), divide=False)
            rewards = {key: value * size / max(size - 1, 1) for key, value in zip(rewards, centred, strict=True)}
        values += to_samples(group, rewards)
    return values
