"""The three reductions, what a masked row can do (nothing), and the KL estimators."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_core.kl import approximate_kl
from miles_core.stages.loss import per_constant, per_sample, per_token, reduce
from miles_core.types import Prompt, Sample

KINDS = ("k1", "k2", "k3", "low_var_kl")


def sample(mask, *, rollout=None, uid=0, stream="train"):
    prompt = Prompt(uid, uid, "", (1,), stream=stream)
    return Sample(prompt, 0, {"loss_mask": np.array(mask, np.uint8)}, len(mask), rollout=rollout)


def test_per_sample_is_the_mean_over_samples_of_their_mean_over_trained_tokens():
    assert per_sample([sample([1, 1, 0, 1]), sample([1])]).tolist() == [1 / 6, 1 / 2]


def test_siblings_share_one_denominator_and_count_once():
    """Two samples of one rollout, of 3 and 1 trained tokens, beside one sample of its own."""
    weights = per_sample([sample([1, 1, 1], rollout=7), sample([0, 1], rollout=7), sample([1, 1])])
    assert weights.tolist() == [1 / 8, 1 / 8, 1 / 4]


def test_the_same_rollout_number_of_another_prompt_is_another_rollout():
    weights = per_sample([sample([1], rollout=0, uid=0), sample([1], rollout=0, uid=1), sample([1], rollout=0, uid=0)])
    assert weights.tolist() == [1 / 4, 1 / 2, 1 / 4]


def test_per_token_is_the_mean_over_all_trained_tokens():
    assert per_token([sample([1, 1, 0, 1]), sample([1])]).tolist() == [1 / 4, 1 / 4]


def test_per_constant_divides_by_the_number_of_rollouts_and_the_constant():
    """Two rollouts, one of them of two samples: 1 / (2 x 8) for each token, however long its sample is."""
    weights = per_constant([sample([1, 1, 0, 1], rollout=3), sample([1], rollout=3), sample([1] * 6)], 8.0)
    assert weights.tolist() == [1 / 16] * 3


@pytest.mark.parametrize("reduction", [per_sample, per_token, lambda samples: per_constant(samples, 4.0)])
def test_a_step_without_trained_tokens_has_finite_weights(reduction):
    assert np.isfinite(reduction([sample([0, 0]), sample([0])])).all()


MASK = st.lists(st.integers(0, 1), min_size=1, max_size=6)
MASKS = st.lists(st.tuples(MASK, st.sampled_from([None, 1, 2])), min_size=1, max_size=8)


@given(MASKS)
def test_the_weights_of_all_trained_tokens_add_up_to_one(masks):
    """Over every rollout that has a trained token: a mean of ones is one."""
    samples = [sample(mask, rollout=rollout) for mask, rollout in masks]
    counts = {}
    for i, one in enumerate(samples):
        key = one.rollout or -1 - i
        counts[key] = counts.get(key, 0) + int(one.columns["loss_mask"].sum())
    trained = [int(one.columns["loss_mask"].sum()) for one in samples]
    share = sum(count > 0 for count in counts.values()) / len(counts)
    assert np.dot(per_sample(samples), trained) == pytest.approx(share)
    assert np.dot(per_token(samples), trained) == pytest.approx(float(any(trained)))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_masked_row_changes_neither_value_nor_gradient(poison):
    values = torch.tensor([1.0, poison, 3.0], requires_grad=True)
    total = reduce(values, torch.tensor([0.5, 0.5, 0.25]), torch.tensor([1.0, 0.0, 1.0]))
    total.backward()
    assert total.item() == 1.25 and values.grad.tolist() == [0.5, 0.0, 0.25]


def test_a_trained_row_that_is_not_finite_stays_so():
    assert not torch.isfinite(reduce(torch.tensor([1.0, math.nan]), torch.ones(2), torch.ones(2)))


def test_kl_estimators_by_hand():
    """p / base = e^d with d = log 2 and -log 2."""
    d = torch.tensor([math.log(2), -math.log(2)], dtype=torch.float64)
    base = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    expected = {"k1": [0.693147, -0.693147], "k2": [0.240227, 0.240227], "k3": [0.193147, 0.306853],
                "low_var_kl": [0.193147, 0.306853]}
    for kind, values in expected.items():
        assert approximate_kl(base + d, base, kind).tolist() == pytest.approx(values, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_kl_of_equal_log_probs_is_exactly_zero(kind):
    x = torch.randn(100)
    assert approximate_kl(x, x.clone(), kind).tolist() == [0.0] * 100


@pytest.mark.parametrize("kind", KINDS)
def test_kl_gradients_are_finite_differences(kind):
    torch.manual_seed(0)
    log_probs, base = torch.randn(2, 20, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: approximate_kl(x, base, kind), log_probs.requires_grad_())


@given(st.floats(-5, 5), st.floats(-5, 5))
def test_k2_and_k3_are_never_negative(a, b):
    for kind in ("k2", "k3", "low_var_kl"):
        assert approximate_kl(torch.tensor(a), torch.tensor(b), kind) >= -1e-7


def test_k3_is_unbiased_and_its_mean_is_the_divergence():
    """Over a whole distribution, the expectation of k1 and of k3 under the policy is KL(policy || base)."""
    torch.manual_seed(1)
    p, q = torch.log_softmax(torch.randn(2, 50, dtype=torch.float64), -1)
    exact = (p.exp() * (p - q)).sum()
    for kind in ("k1", "k3"):
        torch.testing.assert_close((p.exp() * approximate_kl(p, q, kind)).sum(), exact)


def test_low_var_kl_is_bounded_where_k3_is_not():
    far = torch.tensor([-60.0, 60.0, -math.inf, math.inf])
    assert approximate_kl(far, torch.zeros(4), "low_var_kl").tolist() == [10.0] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_reference_of_nan_is_no_divergence_of_zero(kind):
    """The loss and the advantages, which are looked at, have to show it."""
    assert approximate_kl(torch.zeros(1), torch.tensor([math.nan]), kind).isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_an_unbiased_estimate_is_weighted_by_the_ratio_before_the_last_clamp(kind):
    """p / base = e^d with d = 3, ratio 0.5; k3 and low_var_kl: exp(-3) + 2 = 2.049787."""
    base, ratio = torch.zeros(1, dtype=torch.float64), torch.tensor([0.5], dtype=torch.float64)
    expected = {"k1": 3.0, "k2": 4.5, "k3": 2.049787, "low_var_kl": 2.049787}[kind]
    assert approximate_kl(base + 3, base, kind, ratio).item() == pytest.approx(expected / 2, abs=1e-6)
    if kind == "low_var_kl":  # k3 is exp(20) - 21, which the last clamp would have cut to 10
        far = approximate_kl(base - 20, base, kind, ratio * 1e-12)
        assert far.item() == pytest.approx(0.5e-12 * (math.exp(20) - 21))


def test_the_gradient_of_the_unbiased_estimate_is_that_of_the_divergence():
    """Summed over a whole distribution with the weights of the sampling policy, for any of the estimators k1 and k3."""
    torch.manual_seed(2)
    logits = torch.randn(30, dtype=torch.float64, requires_grad=True)
    reference, old = torch.log_softmax(torch.randn(2, 30, dtype=torch.float64), -1)
    policy = torch.log_softmax(logits, -1)
    exact, = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    for kind in ("k1", "k3"):
        estimate = approximate_kl(policy, reference, kind, (policy - old).exp())
        found, = torch.autograd.grad((old.exp() * estimate).sum(), logits, retain_graph=True)
        torch.testing.assert_close(found, exact)


def test_an_unknown_estimator_is_named():
    with pytest.raises(ValueError, match="k9"):
        approximate_kl(torch.zeros(1), torch.zeros(1), "k9")
