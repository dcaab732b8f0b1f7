"""Rewards relative to their group (GRPO, arXiv:2402.03300, section 4.1.2), on which other estimators build, too."""

from __future__ import annotations

import math
from collections.abc import Sequence

from miles_core.config.tables import Algorithm
from miles_core.stages.advantage import DDOF, rollout_rewards, to_samples
from miles_core.types import Batch

STD_EPSILON = 1e-6


def group_relative(batch: Batch, algorithm: Algorithm, *, divide: bool = True) -> list[float]:
    """Each sample's reward relative to the rollouts of its group: GRPO, arXiv:2402.03300, section 4.1.2.

        A_i = (r_i - mean(r)) / (std(r) + 1e-6)        std with n - 1

    Args:
        algorithm: `rewards_normalization` off gives the raw rewards, `std_normalization` off leaves the division out.
        divide: False leaves it out whatever the options say.

    Raises:
        TrainError, RewardError: see `rollout_rewards`.
    """
    divide, values = divide and algorithm.std_normalization, []
    for group in batch.groups:
        rewards = rollout_rewards(group)
        numbers = list(rewards.values())
        if algorithm.rewards_normalization:
            numbers = normalized(numbers, divide=divide)
        values += to_samples(group, dict(zip(rewards, numbers, strict=True)))
    return values


def normalized(rewards: Sequence[float], *, divide: bool = True) -> list[float]:
    """(r - mean) / (std + 1e-6) of one group's rollouts; the order of the rewards has no effect on any bit.

    Equal rewards give exactly 0: with rounding left to itself, three times 0.1 would not. A group of one is centred
    only, which is 0.
    """
    if all(reward == rewards[0] for reward in rewards):
        return [0.0 for _ in rewards]
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not divide:
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - DDOF))
    return [c / (std + STD_EPSILON) for c in centred]
