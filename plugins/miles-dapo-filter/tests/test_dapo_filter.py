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
    with pytest.raises(RewardError, match="sample 1"):
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


@pytest.mark.parametrize("rewards, kind", [
    ((1.0, 1.0), "all_right"), ((0.0, 0.0), "all_wrong"), ((-1.0, -1.0), "all_wrong"), ((0.5, 0.5), "alike")])
def test_drops_are_counted_by_what_was_scored_too(rewards, kind):
    outcome = plugin().filter_group(group(*rewards))
    assert (outcome.reason, outcome.kind) == ("reward_std_zero", kind)


def penalising(most=100, samples=4, **options):
    config = RunConfig(rollout=Rollout(n_samples_per_prompt=samples, rollout_max_response_len=most))
    return DapoFilter(DapoFilterOptions(**{"overlong_buffer_len": 20, **options}), config)


def answers(*pairs):
    return Group(PROMPT, [Sample(PROMPT, i, reward=reward, response_length=length)
                          for i, (reward, length) in enumerate(pairs)])


@given(st.integers(1, 400), st.data())
@settings(deadline=None)
def test_the_penalty_is_equation_13(most, data):
    """Written as the paper has it, with L_max = most and L_cache = buffer."""
    buffer, length = data.draw(st.integers(1, most)), data.draw(st.integers(0, 3 * most))
    if length <= most - buffer:
        expected = 0.0
    elif length <= most:
        expected = ((most - buffer) - length) / buffer
    else:
        expected = -1.0
    found = penalising(most, overlong_buffer_len=buffer).overlong.penalty(answers((1.0, length)).samples[0])
    assert found == pytest.approx(expected) and -1 <= found <= 0


def test_rewards_of_a_batch_lose_the_penalty_once_and_keep_the_raw_score():
    """Hook shape_rewards."""
    batch = [answers((1.0, 80), (1.0, 90), (0.0, 100))]
    assert penalising(overlong_penalty_factor=0.5).shape_rewards(batch) is batch
    assert [sample.reward for sample in batch[0].samples] == [1.0, 0.75, -0.5]
    assert [sample.metadata["raw_reward"] for sample in batch[0].samples] == [1.0, 1.0, 0.0]
    assert [sample.metadata["figures"] for sample in batch[0].samples] == [
        {"overlong_penalty": 0.0, "overlong_ratio": 0.0}, {"overlong_penalty": -0.25, "overlong_ratio": 1.0},
        {"overlong_penalty": -0.5, "overlong_ratio": 1.0}]


def test_without_a_buffer_nothing_is_penalised():
    batch = [answers((1.0, 100))]
    assert plugin().shape_rewards(batch) is batch
    assert (batch[0].samples[0].reward, batch[0].samples[0].metadata) == (1.0, {})


def test_the_filter_looks_at_raw_scores_unless_told_to():
    uneven, even = answers((1.0, 80), (1.0, 100)), answers((1.0, 100), (1.0, 100))
    assert penalising().filter_group(uneven).kind == "all_right"
    after = penalising(filter_penalised=True)
    assert after.filter_group(uneven) is uneven and [s.reward for s in uneven.samples] == [1.0, 1.0]
    assert after.filter_group(even).kind == "all_right"


@pytest.mark.parametrize("options, words", [
    ({"overlong_buffer_len": 0}, "0 of 100 tokens"), ({"overlong_buffer_len": 101}, "101 of 100 tokens"),
    ({"overlong_penalty_factor": 0.0}, "should be above 0"), ({"overlong_penalty_factor": -1.0}, "should be above 0")])
def test_penalties_that_make_no_sense_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        penalising(**options)


@pytest.mark.parametrize("key", ["overlong_penalty_factor", "filter_penalised"])
def test_options_without_effect_are_refused(key):
    config = RunConfig(rollout=Rollout(n_samples_per_prompt=4), origin={f"dapo-filter.{key}": "flag"})
    with pytest.raises(ConfigError, match=f"{key} has no effect without overlong_buffer_len"):
        DapoFilter(DapoFilterOptions(), config)
