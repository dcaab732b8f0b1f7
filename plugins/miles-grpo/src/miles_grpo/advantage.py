"""Group-relative advantages: GRPO, DeepSeekMath (arXiv:2402.03300, section 4.1.2).

    A_i = (r_i - mean(r)) / (std(r) + 1e-6),    std unbiased: sqrt(sum_j (r_j - mean)^2 / (n - 1))

over the n *rollouts* of a group. A rollout is not a sample: siblings, the samples that one execution produced, carry
one number in `Sample.rollout`, share one reward, count once and all receive their rollout's advantage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from miles_core.errors import RewardError, TrainError
from miles_core.types import Group, Sample, Status

EPSILON = 1e-6


def group_relative(group: Group, *, normalize: bool = True, divide: bool = True) -> list[float]:
    """One advantage per sample of a group, in the order of `group.samples`.

    Args:
        normalize: subtract the mean; without it the raw rewards are returned.
        divide: divide by the standard deviation, where the group has more than one rollout.

    Raises:
        TrainError: a sample that was aborted, failed or never finished.
        RewardError: a missing or non-finite reward, or siblings whose rewards differ.
    """
    keys = [("rollout", s.rollout) if s.rollout is not None else ("own", i) for i, s in enumerate(group.samples)]
    rewards: dict[tuple[str, int], float] = {}
    for key, sample in zip(keys, group.samples, strict=True):
        reward = _trainable_reward(sample)
        if rewards.setdefault(key, reward) != reward:
            raise RewardError(
                f"{sample.name} belongs to rollout {sample.rollout}, whose other samples have another reward",
                got=f"{rewards[key]} and {reward}", who="grpo",
                fix="give every sample of one rollout the same reward, or different rollout numbers",
            )
    values = list(rewards.values())
    if normalize:
        values = normalized(values, divide=divide)
    advantages = dict(zip(rewards, values, strict=True))
    return [advantages[key] for key in keys]


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
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - 1))
    return [c / (std + EPSILON) for c in centred]


def _trainable_reward(sample: Sample) -> float:
    if sample.status not in (Status.COMPLETED, Status.TRUNCATED):
        raise TrainError(f"{sample.name} must not be trained on", got=f"status {sample.status}", who="grpo",
                         fix="drop unfinished samples before the advantage stage")
    if sample.reward is None or not math.isfinite(sample.reward):
        raise RewardError(f"{sample.name} has no finite reward", got=repr(sample.reward), who="grpo",
                          fix="name a scorer with --rm-type, or let the generator set sample.reward")
    return sample.reward
