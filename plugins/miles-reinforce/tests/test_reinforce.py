"""REINFORCE++, its baseline and RLOO against hand-computed values and independent loops, and their invariances."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_reinforce.advantage import discounted
from miles_reinforce.plugin import Reinforce
from miles_testing.batches import make_batch, make_sample

from miles_core.config.tables import Algorithm, RunConfig
from miles_core.errors import RewardError, TrainError
from miles_core.types import Batch, Group, Prompt, Status

NAMES = ("returns", "baseline", "leave_one_out")
REWARDS = st.lists(st.floats(-10, 10), min_size=2, max_size=8)


def plugin(**options):
    return Reinforce(RunConfig(algorithm=Algorithm(**options)))


def group(*samples):
    return Batch(0, [Group(samples[0].prompt, list(samples))])


def lists(values):
    return [np.asarray(value).tolist() for value in values]


def test_returns_by_hand():
    """KL 0.1 and 0.2 with coefficient 1, reward 1, gamma 0.5: u = (-0.1, 0.8), G = (0.3, 0.8)."""
    made = group(make_sample(0, 0, 1.0, (1, 1), log_probs=[-1.0, -1.0], ref_log_probs=[-1.1, -1.2]))
    found, = plugin(kl_coef=1.0, gamma=0.5).returns(made)
    assert found.tolist() == pytest.approx([0.3, 0.8], abs=1e-6)


def test_without_discount_and_kl_every_token_gets_the_reward():
    assert lists(plugin().returns(make_batch([1.0, 2.0]))) == [[1, 1], [2, 2]]


def test_the_discount_counts_all_tokens_and_the_reward_stands_at_the_last_trained_one():
    made = group(make_sample(0, 0, 8.0, (1, 0, 1, 0)))
    assert lists(plugin(gamma=0.5).returns(made)) == [[2, 4, 8, 0]]


def test_a_sample_without_trained_tokens_gets_nothing():
    assert lists(plugin(kl_coef=0.1).returns(group(make_sample(
        0, 0, 8.0, (0, 0), log_probs=[1, 2], ref_log_probs=[3, 4])))) == [[0, 0]]


def test_the_baseline_is_the_mean_of_the_group_and_nothing_is_divided():
    assert plugin().baseline(make_batch([1.0, 4.0, 4.0])) == [-2.0, 1.0, 1.0]
    made = make_batch([1.0, 4.0], log_probs=[0, 0], ref_log_probs=[-1, 1])
    assert lists(plugin(kl_coef=0.5).baseline(made)) == [[-2, -1], [1, 2]]


def test_leave_one_out_by_hand():
    """1 - (4 + 7) / 2, 4 - (1 + 7) / 2, 7 - (1 + 4) / 2."""
    assert plugin().leave_one_out(make_batch([1.0, 4.0, 7.0])) == pytest.approx([-4.5, 0.0, 4.5])
    assert plugin().leave_one_out(make_batch([3.0])) == [0.0]
    assert plugin(rewards_normalization=False).leave_one_out(make_batch([1.0, 4.0])) == [1.0, 4.0]


def test_leave_one_out_takes_the_divergence_of_the_whole_rollout_off_the_reward():
    """Two samples of rollout 0 with a KL of 1 and 2 and another rollout without: R = (5 - 3, 1); A = (1, 1, -1)."""
    made = group(make_sample(0, 0, 5.0, (1, 0), 0, log_probs=[1, 9], ref_log_probs=[0, 0]),
                 make_sample(0, 1, 5.0, (1, 1), 0, log_probs=[1, 1], ref_log_probs=[0, 0]),
                 make_sample(0, 2, 1.0, (1, 1), log_probs=[0, 0], ref_log_probs=[0, 0]))
    assert plugin(kl_coef=1.0).leave_one_out(made) == pytest.approx([1.0, 1.0, -1.0])


@given(REWARDS)
@settings(deadline=None)
def test_leave_one_out_is_the_mean_of_the_others(rewards):
    expected = [reward - (sum(rewards) - reward) / (len(rewards) - 1) for reward in rewards]
    assert plugin().leave_one_out(make_batch(rewards)) == pytest.approx(expected, abs=1e-9)


@given(REWARDS, st.floats(0.5, 1), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=50)
def test_returns_agree_with_an_independent_sum(rewards, gamma, seed):
    draw, samples = np.random.default_rng(seed), []
    for i, reward in enumerate(rewards):
        size = int(draw.integers(1, 6))
        samples.append(make_sample(0, i, reward, draw.integers(0, 2, size), log_probs=draw.normal(size=size),
                                   ref_log_probs=draw.normal(size=size)))
    found = plugin(kl_coef=0.3, kl_loss_type="k2", gamma=gamma).returns(group(*samples))
    for sample, values in zip(samples, found, strict=True):
        c, trained = sample.columns, np.flatnonzero(sample.columns["loss_mask"])
        for t, value in enumerate(values):
            total = 0.0
            for k in range(t, len(values)):
                if c["loss_mask"][k]:
                    kl = (float(c["log_probs"][k]) - float(c["ref_log_probs"][k])) ** 2 / 2
                    total += gamma ** (k - t) * (-0.3 * kl + (sample.reward if k == trained[-1] else 0.0))
            assert value == pytest.approx(total, abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
@given(rewards=REWARDS, random=st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=25)
def test_permuting_a_group_permutes_its_advantages(name, rewards, random):
    order = random.sample(range(len(rewards)), len(rewards))
    estimate = getattr(plugin(gamma=0.9), name)
    values, moved = lists(estimate(make_batch(rewards))), lists(estimate(make_batch([rewards[i] for i in order])))
    assert moved == [values[i] for i in order]


@pytest.mark.parametrize("name", ("baseline", "leave_one_out"))
@pytest.mark.parametrize("reward", [0.0, 0.1, -7.0])
def test_equal_rewards_give_exactly_zero(name, reward):
    assert getattr(plugin(), name)(make_batch([reward] * 3)) == [0.0] * 3


@pytest.mark.parametrize("name", NAMES)
def test_what_cannot_be_trained_on_is_refused(name):
    made = make_batch([1.0, float("nan")])
    with pytest.raises(RewardError, match="sample 1"):
        getattr(plugin(), name)(made)
    made.samples[0].status = Status.ABORTED
    with pytest.raises(TrainError, match="sample 0"):
        getattr(plugin(), name)(made)


def test_siblings_count_once():
    made = Batch(0, [Group(Prompt(0, 0, "", ()), [make_sample(0, i, r, (1,), rollout) for i, (r, rollout) in
                                                  enumerate([(1.0, 0), (1.0, 0), (4.0, None)])])])
    assert plugin().baseline(made) == [-1.5, -1.5, 1.5]
    assert plugin().leave_one_out(made) == [-3.0, -3.0, 3.0]


@given(st.lists(st.floats(-10, 10), max_size=8), st.floats(0, 1))
def test_returns_are_discounted_sums(rewards, gamma):
    expected = [sum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))]
    assert discounted(np.array(rewards), gamma).tolist() == pytest.approx(expected, abs=1e-9)


def test_the_plugin_module_imports_no_torch():
    code = f"import sys; sys.path[:] = {sys.path!r}; import miles_reinforce.plugin; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
