"""Dynamic sampling: DAPO (arXiv:2503.14476, section 3.2). Miles calls it check_reward_nonzero_std.

A group is kept when

    std(r) = sqrt(sum_i (r_i - mean)^2 / (n - 1)) > min_std

over the rewards of its n samples. DAPO states it for rewards of 0 and 1, as 0 < number of correct answers < n.
"""

from __future__ import annotations

import math

from miles_core.errors import RewardError
from miles_core.types import Drop, Group


def reward_std(rewards: list[float]) -> float:
    """Unbiased; 0 for a single reward, and exactly 0 for equal ones."""
    if all(reward == rewards[0] for reward in rewards):
        return 0.0
    mean = math.fsum(rewards) / len(rewards)
    return math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))


def keep_spread(group: Group, min_std: float) -> Group | Drop:
    """The group itself, or a Drop with reason "reward_std_zero".

    Raises:
        RewardError: a sample that nobody scored.
    """
    for sample in group.samples:
        if sample.reward is None:
            raise RewardError(f"nobody scored {sample.name}", who="dapo-filter", fix="name a scorer with --rm-type")
    rewards = [sample.reward for sample in group.samples]
    if reward_std(rewards) > min_std:
        return group
    low, high = min(rewards), max(rewards)
    scored = f"{low:g}" if low == high else f"between {low:g} and {high:g}"
    return Drop("reward_std_zero", f"all {len(rewards)} answers to prompt {group.prompt.uid} scored {scored}")
