"""Groups without spread are dropped with a reason; all others pass unchanged."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_dapo_filter.plugin import DapoFilter, DapoFilterOptions
from miles_dapo_filter.spread import reward_std

from miles_core.config import RunConfig
from miles_core.config.tables import Rollout
from miles_core.errors import ConfigError, RewardError
from miles_core.types import Drop, Group, Prompt, Sample

PROMPT = Prompt(uid=11, row=2, text="1+1=", token_ids=(1,))


def group(*rewards):
    return Group(PROMPT, [Sample(PROMPT, i, reward=reward) for i, reward in enumerate(rewards)])


def plugin(samples=4, **options):
    return DapoFilter(DapoFilterOptions(**options), RunConfig(rollout=Rollout(n_samples_per_prompt=samples)))


@pytest.mark.parametrize("rewards", [(0.0, 0.0), (1.0, 1.0, 1.0, 1.0), (0.1,) * 7, (0.5,), (1.0, 1.0 + 1e-12)])
def test_groups_without_spread_are_dropped(rewards):
    outcome = plugin().filter_group(group(*rewards))
    assert isinstance(outcome, Drop)
    assert outcome.reason == "reward_std_zero"
    assert f"all {len(rewards)} answers to prompt 11" in outcome.detail


@pytest.mark.parametrize("rewards", [(0.0, 1.0), (1.0, 1.0, 1.0, 0.0), (0.1, 0.1, 0.1001)])
def test_groups_with_spread_pass_unchanged(rewards):
    given_group = group(*rewards)
    assert plugin().filter_group(given_group) is given_group
    assert [sample.reward for sample in given_group.samples] == list(rewards)


def test_the_threshold_is_an_option():
    # the unbiased standard deviation of 0 and 1 is sqrt(1/2)
    assert isinstance(plugin(min_reward_std=0.71).filter_group(group(0.0, 1.0)), Drop)
    assert isinstance(plugin(min_reward_std=0.70).filter_group(group(0.0, 1.0)), Group)


def test_the_detail_says_what_was_scored():
    assert plugin().filter_group(group(0.5, 0.5)).detail.endswith("scored 0.5")
    assert plugin(min_reward_std=1.0).filter_group(group(0.0, 1.0)).detail.endswith("scored between 0 and 1")


def test_an_unscored_sample_is_an_error():
    with pytest.raises(RewardError, match="nobody scored.*sample 1"):
        plugin().filter_group(group(1.0, None))


def test_a_run_that_could_only_drop_does_not_start():
    with pytest.raises(ConfigError, match="at least 2 answers"):
        plugin(samples=1)


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=16))
@settings(deadline=None)
def test_binary_rewards_follow_the_paper(rewards):
    kept = isinstance(plugin().filter_group(group(*rewards)), Group)
    assert kept == (0 < sum(rewards) < len(rewards))


@given(st.floats(-1e6, 1e6), st.integers(1, 20))
@settings(deadline=None)
def test_equal_rewards_have_a_deviation_of_exactly_zero(reward, count):
    assert reward_std([reward] * count) == 0.0
