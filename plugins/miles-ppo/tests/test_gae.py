"""Generalised advantage estimation: by hand, against an independent sum, chunked against vanilla, masks and order."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_ppo.gae import CHUNK, ESTIMATORS, advantages_and_returns, chunked_gae, vanilla_gae
from miles_testing.batches import make_sample

from miles_core.config.tables import Algorithm
from miles_core.errors import RewardError
from miles_core.types import Batch, Group, Prompt

BOTH = pytest.mark.parametrize("name", ESTIMATORS)


def batch(*samples):
    return Batch(0, [Group(Prompt(0, 0, "", (0, 1)), list(samples))])


@BOTH
def test_three_tokens_by_hand(name):
    """gamma 0.5, lambda 0.5; V = 1, 2, 4; the reward 8 comes at the end.

    delta = 0 + 0.5 x 2 - 1 = 0,   0 + 0.5 x 4 - 2 = 0,   8 + 0 - 4 = 4;   A = 4 / 16, 4 / 4, 4.
    """
    made = batch(make_sample(0, 0, 8.0, (1, 1, 1), values=[1, 2, 4]))
    found, = advantages_and_returns(made, Algorithm(gamma=0.5, lambd=0.5), ESTIMATORS[name])
    assert found.tolist() == [0.25, 1.0, 4.0]
    assert made.samples[0].columns["returns"].tolist() == [1.25, 3.0, 8.0]
    assert made.samples[0].columns["returns"].dtype == np.float32


@BOTH
def test_a_tools_tokens_are_left_out_before_anything_else(name):
    """As above with a hole, whose value must not matter, and a reward that falls on the last trained token."""
    made = batch(make_sample(0, 0, 8.0, (1, 0, 1, 1, 0), values=[1, 1e9, 2, 4, -1e9]))
    found, = advantages_and_returns(made, Algorithm(gamma=0.5, lambd=0.5), ESTIMATORS[name])
    assert found.tolist() == [0.25, 0.0, 1.0, 4.0, 0.0]
    assert made.samples[0].columns["returns"].tolist() == [1.25, 0.0, 3.0, 8.0, 0.0]


def test_the_kl_penalty_is_a_reward_at_each_token():
    """k1 of 0.5 and -1, kl_coef 0.1, V = 0, gamma = lambda = 1: returns are sums of u = -0.05 and 0.1 + 2."""
    made = batch(make_sample(0, 0, 2.0, (1, 1), values=[0, 0], log_probs=[-1.0, -2.0], ref_log_probs=[-1.5, -1.0]))
    found, = advantages_and_returns(made, Algorithm(kl_coef=0.1), vanilla_gae)
    np.testing.assert_allclose(found, [2.05, 2.1], rtol=1e-6)


def test_a_sample_without_a_trained_token_has_nothing_to_learn():
    made = batch(make_sample(0, 0, 5.0, (0, 0), values=[3, 3]), make_sample(0, 1, 5.0, (1,), values=[3]))
    found = advantages_and_returns(made, Algorithm(), chunked_gae)
    assert [row.tolist() for row in found] == [[0, 0], [2]]
    assert made.samples[0].columns["returns"].tolist() == [0, 0]


def test_a_reward_that_is_missing_is_not_a_zero():
    with pytest.raises(RewardError, match=r"\[reward-not-finite\]"):
        advantages_and_returns(batch(make_sample(0, 0, float("nan"), (1,), values=[0])), Algorithm(), vanilla_gae)


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5, 2000])
@pytest.mark.parametrize("gamma, lambd", [(1, 1), (0.99, 0.95), (1, 0), (0, 1), (0.5, 0.9)])
def test_chunks_do_not_matter(size, gamma, lambd):
    draw = np.random.default_rng(size)
    rewards, values = draw.normal(size=(2, size))
    one, other = (estimate(rewards, values, gamma, lambd) for estimate in (vanilla_gae, chunked_gae))
    np.testing.assert_allclose(other, one, rtol=1e-12, atol=1e-11)


ROW = st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=20)


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(ROW, st.floats(0, 1), st.floats(0, 1))
def test_both_are_the_exponentially_weighted_sum_of_k_step_advantages(row, gamma, lambd):
    """Eq. 16 of arXiv:1506.02438 as it is written: A_t = sum over l of (gamma lambda)^l delta_{t+l}."""
    rewards, values = np.array(row).T
    following = np.append(values[1:], 0.0)
    deltas = rewards + gamma * following - values
    expected = [sum((gamma * lambd) ** (j - i) * deltas[j] for j in range(i, len(row))) for i in range(len(row))]
    for estimate in ESTIMATORS.values():
        np.testing.assert_allclose(estimate(rewards, values, gamma, lambd), expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(ROW, st.floats(0, 1))
def test_lambda_one_is_the_return_less_the_value_and_zero_is_one_step(row, gamma):
    rewards, values = np.array(row).T
    returns = np.array([sum(gamma ** (j - i) * rewards[j] for j in range(i, len(row))) for i in range(len(row))])
    for estimate in ESTIMATORS.values():
        np.testing.assert_allclose(estimate(rewards, values, gamma, 1.0), returns - values, rtol=1e-9, atol=1e-9)
        step = rewards + gamma * np.append(values[1:], 0.0) - values
        np.testing.assert_allclose(estimate(rewards, values, gamma, 0.0), step, rtol=1e-12, atol=1e-12)


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.sampled_from(sorted(ESTIMATORS)))
def test_neither_masked_rows_nor_the_order_of_samples_matter(seed, count, name):
    draw, algorithm = np.random.default_rng(seed), Algorithm(gamma=0.97, lambd=0.9, kl_coef=0.1)

    def made(poison):
        rng = np.random.default_rng(seed)
        samples = []
        for i in range(count):
            mask = rng.integers(0, 2, rng.integers(1, 9))
            columns = {key: rng.normal(size=len(mask)) for key in ("values", "log_probs", "ref_log_probs")}
            hidden = {key: np.where(mask > 0, value, poison) for key, value in columns.items()}
            samples.append(make_sample(0, i, float(rng.normal()), tuple(mask), **hidden))
        return samples

    def run(samples):
        return advantages_and_returns(batch(*samples), algorithm, ESTIMATORS[name])

    clean, dirty, order = made(0.0), made(1e30), draw.permutation(count)
    expected = run(clean)
    for one, other in zip(expected, run(dirty), strict=True):
        np.testing.assert_array_equal(one, other)
    for one, i in zip(run([clean[i] for i in order]), order, strict=True):
        np.testing.assert_array_equal(one, expected[i])
