"""What estimators share: the column and its checks, whitening, KL in the reward, returns."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_testing.batches import make_batch, make_sample
from miles_testing.toy import toy_group

from miles_core.config.tables import Algorithm
from miles_core.errors import TrainError
from miles_core.stages.advantage import check, fill, kl_penalties, penalised, token_rewards, whiten
from miles_core.types import Batch, Group, Prompt


def batch():
    return Batch(0, [toy_group(Prompt(uid, uid, "", (1, 2)), 1) for uid in range(2)])


def test_numbers_are_spread_and_arrays_are_taken_as_they_are():
    made = batch()
    made.samples[1].columns["loss_mask"] = np.array([0, 1], np.uint8)
    metrics = fill(made, [1.0, np.array([9.0, 2.0]), -1, 0.5], "mine")
    assert [s.columns["advantages"].tolist() for s in made.samples] == [[1, 1], [9, 2], [-1, -1], [0.5, 0.5]]
    assert all(s.columns["advantages"].dtype == np.float32 for s in made.samples)
    assert metrics == {"rollout/advantages": pytest.approx((1 + 1 + 2 - 2 + 1) / 7)}


@pytest.mark.parametrize("values", [[1.0], [1.0, 2.0, 3.0, np.ones(3)], [1.0, float("nan"), 1.0, 1.0]])
def test_the_wrong_count_length_or_number_names_the_estimator(values):
    with pytest.raises(TrainError, match="'mine'"):
        fill(batch(), values, "mine")


@pytest.mark.parametrize("values", [None, iter([1.0, 2.0, 3.0, 4.0]), dict.fromkeys(range(4), 1.0)])
def test_what_is_no_sequence_is_the_estimators_mistake(values):
    """The keys of a dict would be taken for advantages."""
    with pytest.raises(TrainError, match="'mine'") as caught:
        fill(batch(), values, "mine")
    assert caught.value.code == "advantages-count"


def test_what_a_hook_left_behind_is_checked_by_name():
    made = make_batch([1.0, 2.0])
    fill(made, [0.0, 0.0], "mine")
    made.samples[1].columns["advantages"][1] = np.nan
    with pytest.raises(TrainError, match=r"shape_advantages .* train prompt 0 .*, sample 1.*\[advantages-not-finite\]"):
        check(made, "shape_advantages")
    made.samples[1].columns["advantages"] = np.zeros(3, np.float32)
    with pytest.raises(TrainError, match=r"\[3\] for R = 2"):
        check(made, "shape_advantages")
    del made.samples[1].columns["advantages"]
    with pytest.raises(TrainError, match="shape_advantages"):
        check(made, "shape_advantages")


def test_whitening_by_hand():
    """Trained advantages 1, 2, 3: mean 2, variance (1 + 0 + 1) / 2 = 1; the masked 9 is mapped alike."""
    made = Batch(0, [Group(Prompt(0, 0, "", ()), [make_sample(0, 0, 0.0, (1, 0), advantages=[1, 9]),
                                                  make_sample(0, 1, 0.0, (1, 1), advantages=[2, 3])])])
    whiten(made)
    scale = 1 / math.sqrt(1 + 1e-8)
    np.testing.assert_allclose(np.concatenate([s.columns["advantages"] for s in made.samples]),
                               np.array([-1, 7, 0, 1]) * scale, rtol=1e-6)
    assert all(s.columns["advantages"].dtype == np.float32 for s in made.samples)


@pytest.mark.parametrize("value", [0.0, 0.1, -3.0])
@pytest.mark.parametrize("mask", [(1, 1), (1, 0)])
def test_whitening_equal_advantages_gives_exactly_zero(value, mask):
    made = Batch(0, [Group(Prompt(0, 0, "", ()), [make_sample(0, 0, 0.0, mask, advantages=[value, value])])])
    whiten(made)
    assert made.samples[0].columns["advantages"].tolist() == [0.0, 0.0]


def test_whitening_a_rollout_without_trained_tokens_is_nothing():
    made = Batch(0, [Group(Prompt(0, 0, "", ()), [make_sample(0, 0, 0.0, (0, 0), advantages=[1, 2])])])
    whiten(made)
    assert made.samples[0].columns["advantages"].tolist() == [1.0, 2.0]


@given(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=20), st.floats(-5, 5), st.floats(0.1, 10))
@settings(deadline=None, max_examples=50)
def test_whitened_advantages_have_mean_0_and_variance_1_whatever_their_scale(values, shift, scale):
    def whitened(numbers):
        made = Batch(0, [Group(Prompt(0, 0, "", ()), [
            make_sample(0, i, 0.0, (1,), advantages=[number]) for i, number in enumerate(numbers)])])
        whiten(made)
        return np.array([float(s.columns["advantages"][0]) for s in made.samples])

    if np.std(values) > 1:
        found = whitened(values)
        assert abs(found.mean()) < 1e-5 and found.var(ddof=1) == pytest.approx(1, abs=1e-4)
        moved = np.float32(shift) + np.float32(scale) * np.float32(values)
        np.testing.assert_allclose(whitened(moved), found, atol=1e-3)


def kl_batch(mask=(1, 0, 1)):
    """d = log 2, (masked), -log 2."""
    made = make_sample(0, 0, 5.0, mask, log_probs=[math.log(2), 7, 0], ref_log_probs=[0, 0, math.log(2)],
                       rollout_log_probs=[0, 9, 0])
    return Batch(0, [Group(made.prompt, [made])])


@pytest.mark.parametrize(("kind", "values"), [("k1", [0.693147, -0.693147]), ("k2", [0.240227, 0.240227]),
                                              ("k3", [0.193147, 0.306853]), ("low_var_kl", [0.193147, 0.306853])])
def test_the_kl_penalty_of_each_token_by_hand(kind, values):
    """k3 of d = log 2 is exp(-d) - 1 + d = 0.193147."""
    penalty, = kl_penalties(kl_batch(), Algorithm(kl_coef=0.5, kl_loss_type=kind))
    assert penalty.tolist() == pytest.approx([-0.5 * values[0], 0, -0.5 * values[1]], abs=1e-6)


def test_the_penalty_is_that_of_the_old_policy():
    penalty, = kl_penalties(kl_batch(), Algorithm(kl_coef=1.0, use_rollout_logprobs=True))
    assert penalty.tolist() == pytest.approx([0, 0, math.log(2)])


def test_without_a_coefficient_no_log_probs_are_needed():
    made = make_batch([1.0, 2.0])
    assert [p.tolist() for p in kl_penalties(made, Algorithm())] == [[0, 0], [0, 0]]
    assert penalised(made, [1.0, 2.0], Algorithm()) == [1.0, 2.0]


def test_a_penalised_number_becomes_one_for_each_token():
    found, = penalised(kl_batch(), [3.0], Algorithm(kl_coef=1.0))
    assert found.tolist() == pytest.approx([3 - math.log(2), 3, 3 + math.log(2)])


def test_the_reward_stands_at_the_last_trained_token():
    found, = token_rewards(kl_batch((1, 1, 0)), Algorithm(kl_coef=1.0))
    assert found.tolist() == pytest.approx([-math.log(2), 5 - 7, 0])
    found, = token_rewards(kl_batch((0, 0, 0)), Algorithm(kl_coef=1.0))
    assert found.tolist() == [0, 0, 0]
