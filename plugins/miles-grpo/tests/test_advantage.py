"""Group-relative advantages against hand-computed values, and their invariances."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_grpo.advantage import STD_EPSILON, group_relative, normalized

from miles_core.config.tables import Algorithm
from miles_core.errors import RewardError, TrainError
from miles_core.types import Batch, Group, Prompt, Sample, Status

PROMPT = Prompt(uid=3, row=3, text="1+1=", token_ids=(1, 2))
REWARDS = st.lists(st.floats(-100, 100, allow_subnormal=False), min_size=1, max_size=16)


def group(rewards, rollouts=None, status=Status.COMPLETED):
    rollouts = rollouts or [None] * len(rewards)
    samples = [
        Sample(PROMPT, i, reward=reward, rollout=rollout, status=status)
        for i, (reward, rollout) in enumerate(zip(rewards, rollouts, strict=True))
    ]
    return Group(PROMPT, samples)


def relative(group, **options):
    """The estimator for one group."""
    return group_relative(Batch(0, [group]), Algorithm(**options))


def test_hand_computed():
    # mean 0.5, squared deviations 4 x 0.25 = 1, divided by n - 1 = 3
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    assert normalized([1.0, 0.0, 0.0, 1.0]) == pytest.approx([expected, -expected, -expected, expected], rel=1e-12)
    # mean 2, squared deviations 1 + 1 = 2, divided by 2: std 1
    assert normalized([1.0, 2.0, 3.0]) == pytest.approx([-1 / 1.000001, 0.0, 1 / 1.000001], rel=1e-12)


def test_without_std_and_without_normalization():
    assert normalized([1.0, 2.0, 6.0], divide=False) == [-2.0, -1.0, 3.0]
    assert relative(group([1.0, 2.0, 6.0]), rewards_normalization=False) == [1.0, 2.0, 6.0]


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -0.3, 1e-12, 1e6])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 10])
def test_constant_rewards_give_exactly_zero(reward, size):
    assert normalized([reward] * size) == [0.0] * size
    assert normalized([reward] * size, divide=False) == [0.0] * size


def test_siblings_count_once():
    # rollouts 0 and 1 with rewards 1 and 0, and a sample that is its own rollout with reward 0
    advantages = relative(group([1.0, 1.0, 1.0, 0.0, 0.0], rollouts=[0, 0, 0, 1, None]))
    once = normalized([1.0, 0.0, 0.0])
    assert advantages == [once[0], once[0], once[0], once[1], once[2]]


def test_a_rollout_number_is_not_a_position():
    # The rollout numbered 1 and the lone sample at position 1 are two rollouts.
    assert relative(group([1.0, 0.0], rollouts=[1, None])) == normalized([1.0, 0.0])


def test_siblings_with_rewards_of_their_own_are_compared_each_by_itself():
    """Agents of one execution; those that agree still count once."""
    assert relative(group([1.0, 0.5], rollouts=[4, 4])) == normalized([1.0, 0.5])
    advantages = relative(group([1.0, 0.5, 0.0, 0.0], rollouts=[4, 4, 5, 5]))
    once = normalized([1.0, 0.5, 0.0])
    assert advantages == [*once, once[2]]


@pytest.mark.parametrize("status", [Status.ABORTED, Status.FAILED, Status.PENDING])
def test_unfinished_samples_are_refused(status):
    with pytest.raises(TrainError, match=f"sample 0.*{status}"):
        relative(group([1.0, 0.0], status=status))


def test_truncated_samples_are_welcome():
    assert relative(group([1.0, 0.0], status=Status.TRUNCATED)) == normalized([1.0, 0.0])


@pytest.mark.parametrize("reward", [None, math.nan, math.inf, 1e39])
def test_rewards_must_be_there_and_finite(reward):
    with pytest.raises(RewardError, match=r"sample 1.*\[reward-not-finite\]"):
        relative(group([1.0, reward]))


def test_the_order_of_the_batch_is_kept():
    batch = Batch(0, [group([1.0, 0.0]), group([3.0, 3.0, 3.0]), group([0.0, 2.0])])
    advantages = group_relative(batch, Algorithm())
    assert advantages == [*normalized([1.0, 0.0]), 0.0, 0.0, 0.0, *normalized([0.0, 2.0])]


def test_the_options_are_obeyed():
    assert relative(group([1.0, 4.0]), std_normalization=False) == [-1.5, 1.5]
    assert group_relative(Batch(0, [group([1.0, 4.0])]), Algorithm(), divide=False) == [-1.5, 1.5]
    assert relative(group([1.0, 4.0]), rewards_normalization=False) == [1.0, 4.0]


@given(REWARDS)
@settings(deadline=None)
def test_agrees_with_statistics(rewards):
    if len(set(rewards)) == 1:
        return
    mean, std = statistics.mean(rewards), statistics.stdev(rewards)
    expected = [(reward - mean) / (std + STD_EPSILON) for reward in rewards]
    assert normalized(rewards) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(REWARDS, st.randoms(use_true_random=False))
@settings(deadline=None)
def test_permuting_a_group_permutes_its_advantages(rewards, random):
    order = list(range(len(rewards)))
    random.shuffle(order)
    advantages = normalized(rewards)
    assert normalized([rewards[i] for i in order]) == [advantages[i] for i in order]


@given(REWARDS)
@settings(deadline=None)
def test_advantages_sum_to_zero(rewards):
    assert math.fsum(normalized(rewards)) == pytest.approx(0, abs=1e-5)


@given(st.lists(st.integers(-50, 50), min_size=2, max_size=10), st.integers(-1000, 1000))
@settings(deadline=None)
def test_a_shift_of_all_rewards_changes_nothing(rewards, shift):
    moved = normalized([float(reward + shift) for reward in rewards])
    np.testing.assert_allclose(moved, normalized([float(reward) for reward in rewards]), rtol=0, atol=1e-9)
