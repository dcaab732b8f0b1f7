"""Dynamic sampling: DAPO (arXiv:2503.14476, section 3.2). Miles calls it check_reward_nonzero_std.

A group is kept when

    std(r) = sqrt(sum_i (r_i - mean)^2 / (n - 1)) > min_std

over the rewards of its n samples. DAPO states it for rewards of 0 and 1, as 0 < number of correct answers < n.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from miles_core.errors import RewardError
from miles_core.types import Drop, Group, Sample


def reward_std(rewards: list[float]) -> float:
    """Unbiased; 0 for a single reward, and exactly 0 for equal ones."""
    if all(reward == rewards[0] for reward in rewards):
        return 0.0
    mean = math.fsum(rewards) / len(rewards)
    return math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))


def keep_spread(group: Group, min_std: float, penalty: Callable[[Sample], float] | None = None) -> Group | Drop:
    """The group itself, or a Drop with reason "reward_std_zero" and of a kind that `kind_of` gives.

    Args:
        penalty: what is added to the reward of a sample before it is looked at.

    Raises:
        RewardError: a sample without a score.
    """
    raw, rewards = [], []
    for sample in group.samples:
        if sample.reward is None:
            raise RewardError(f"no scorer scored {sample.name}", code="dapo-sample-without-score", who="dapo-filter",
                              fix="name a scorer with --rm-type")
        raw.append(sample.reward)
        rewards.append(sample.reward + (penalty(sample) if penalty else 0.0))
    if reward_std(rewards) > min_std:
        return group
    low, high = min(rewards), max(rewards)
    scored = f"{low:g}" if low == high else f"between {low:g} and {high:g}"
    return Drop("reward_std_zero", f"all {len(rewards)} answers to prompt {group.prompt.uid} scored {scored}",
                kind_of(raw))


def kind_of(rewards: list[float]) -> str:
    """"all_right" where every raw reward is at least 1, "all_wrong" where none is above 0, else "alike"."""
    if min(rewards) >= 1:
        return "all_right"
    return "all_wrong" if max(rewards) <= 0 else "alike"
