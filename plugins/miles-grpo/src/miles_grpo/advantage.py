"""Rewards relative to their group (GRPO, arXiv:2402.03300, section 4.1.2), on which other estimators build, too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from miles_core.config.tables import Algorithm
from miles_core.stages.advantage import DDOF, rollout_rewards, to_samples
from miles_core.stages.reward import weighted_sum
from miles_core.types import Batch, Group, Sample, rollout_keys

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


def decoupled(batch: Batch, algorithm: Algorithm, weights: Mapping[str, float]) -> list[float]:
    """Each scorer's rewards relative to the rollouts of their group, added up and relative to the batch: GDPO,
    arXiv:2601.05242.

        A_ik = (r_ik - mean(r_k)) / (std(r_k) + 1e-6)        over the rollouts of the group, for each scorer k
        S_i = sum_k w_k A_ik
        A_i = (S_i - mean(S)) / (std(S) + 1e-6)              over all rollouts of the batch

    What else became part of the reward, such as a penalty of the answer's length, counts as one scorer more.

    Args:
        algorithm: as in `group_relative`, for the first line.
        weights: scorer -> w_k.

    Raises:
        TrainError, RewardError: see `rollout_rewards`.
    """
    sums = [_sums(group, algorithm, weights) for group in batch.groups]
    relative = iter(normalized([value for group in sums for value in group.values()]))
    return [value for group, own in zip(batch.groups, sums, strict=True)
            for value in to_samples(group, {key: next(relative) for key in own})]


def _sums(group: Group, algorithm: Algorithm, weights: Mapping[str, float]) -> dict[object, float]:
    """Rollout -> sum of the advantages that its scorers give it."""
    rewards = rollout_rewards(group)
    samples: dict[object, Sample] = {}
    for key, sample in zip(rollout_keys(group), group.samples, strict=True):
        samples.setdefault(key, sample)
    names = sorted({name for sample in samples.values() for name in sample.rewards} & weights.keys())
    parts = [(weights[name], [samples[key].rewards.get(name, 0.0) for key in rewards]) for name in names]
    parts.append((1.0, [reward - weighted_sum(samples[key], weights) for key, reward in rewards.items()]))
    if algorithm.rewards_normalization:
        parts = [(weight, normalized(values, divide=algorithm.std_normalization)) for weight, values in parts]
    return {key: math.fsum(weight * values[i] for weight, values in parts) for i, key in enumerate(rewards)}


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
