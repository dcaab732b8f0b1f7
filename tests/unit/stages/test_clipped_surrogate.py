"""The clipped surrogate against hand-computed values and an independent implementation, loss and gradient."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.errors import ConfigError
from miles_core.stages.loss import LossInputs, clipped_surrogate

torch.set_num_threads(1)


def inputs(log_probs, old, advantages, mask=None, low=0.2, high=0.28, dual=None):
    """LossInputs of N tokens of one sample."""
    log_probs, old, advantages = (torch.as_tensor(x, dtype=torch.float64) for x in (log_probs, old, advantages))
    mask = torch.ones_like(old) if mask is None else torch.as_tensor(mask, dtype=torch.float64)
    return LossInputs(
        log_probs=log_probs, entropy=None, old_log_probs=old, rollout_log_probs=old, ref_log_probs=None,
        advantages=advantages, mask=mask, sample=torch.zeros(len(old), dtype=torch.int64),
        segment_sum=lambda values: values.sum(0, keepdim=True), rows={}, eps_clip=low, eps_clip_high=high,
        eps_clip_c=dual,
    )


def reference(log_prob, old, advantage, active, low, high, dual):
    """Loss, d loss / d log_prob and clip indicator of one token, by cases; knows nothing of max and min."""
    if not active:
        return 0.0, 0.0, 0.0
    distance = log_prob - old
    ratio = math.exp(min(max(distance, -20.0), 20.0))
    inside = abs(distance) <= 20.0
    slope = -ratio * advantage if inside else 0.0
    if advantage >= 0:
        if ratio > 1 + high:
            return -(1 + high) * advantage, 0.0, float(advantage > 0)
        return -ratio * advantage, slope, 0.0
    if ratio < 1 - low:
        return -(1 - low) * advantage, 0.0, 1.0
    if dual is not None and ratio > dual:
        return -dual * advantage, 0.0, 0.0
    return -ratio * advantage, slope, 0.0


TOKEN = st.tuples(
    st.floats(-30, 0), st.floats(-30, 0), st.floats(-3, 3).filter(lambda a: a == 0 or abs(a) > 1e-6), st.booleans()
)
BAND = st.tuples(st.floats(0.01, 0.5), st.floats(0.01, 0.5), st.one_of(st.none(), st.floats(1.6, 10)))


def test_dual_clip_hand_computed():
    old = torch.zeros(3)
    log_probs = torch.log(torch.tensor([2.0, 2.0, 0.5], dtype=torch.float64))
    loss, metrics = clipped_surrogate(inputs(log_probs, old, [2.0, -2.0, 2.0], low=0.2, high=0.2, dual=1.5))
    torch.testing.assert_close(loss, torch.tensor([-2.4, 3.0, -1.0], dtype=torch.float64))
    assert metrics["pg_clipfrac"].tolist() == [1.0, 0.0, 0.0]
    torch.testing.assert_close(metrics["ppo_kl"], -log_probs)


def test_the_band_is_asymmetric():
    log_probs = torch.log(torch.tensor([1.25, 1.25, 0.75], dtype=torch.float64))
    loss, metrics = clipped_surrogate(inputs(log_probs, [0.0] * 3, [1.0, 1.0, -1.0], low=0.2, high=0.28))
    torch.testing.assert_close(loss, torch.tensor([-1.25, -1.25, 0.8], dtype=torch.float64))
    assert metrics["pg_clipfrac"].tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("constant", [1.0, 0.5, -3.0, math.nan])
def test_a_dual_clip_constant_of_one_or_less_is_refused(constant):
    with pytest.raises(ConfigError, match="above 1"):
        clipped_surrogate(inputs([0.0], [0.0], [1.0], dual=constant))


@given(st.lists(TOKEN, min_size=1, max_size=20), BAND)
@settings(deadline=None)
def test_agrees_with_the_independent_implementation(tokens, band):
    log_probs, old, advantages, active = (list(x) for x in zip(*tokens, strict=True))
    low, high, dual = band
    leaf = torch.tensor(log_probs, dtype=torch.float64, requires_grad=True)
    loss, metrics = clipped_surrogate(inputs(leaf, old, advantages, active, low, high, dual))
    loss.sum().backward()
    expected = [reference(*token, *band) for token in tokens]
    torch.testing.assert_close(loss.tolist(), [e[0] for e in expected], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(leaf.grad.tolist(), [e[1] for e in expected], rtol=1e-12, atol=1e-12)
    assert metrics["pg_clipfrac"].tolist() == [e[2] for e in expected]


@pytest.mark.parametrize("dual", [None, 3.0])
def test_gradient_by_finite_differences(dual):
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(64, generator=generator, dtype=torch.float64) - 2
    log_probs = (old + 0.7 * torch.randn(64, generator=generator, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(64, generator=generator, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: clipped_surrogate(inputs(x, old, advantages, dual=dual))[0], (log_probs,))


@given(st.lists(TOKEN, min_size=1, max_size=10))
@settings(deadline=None)
def test_a_ratio_of_one_gives_the_plain_policy_gradient(tokens):
    log_probs, _, advantages, _ = (list(x) for x in zip(*tokens, strict=True))
    leaf = torch.tensor(log_probs, dtype=torch.float64, requires_grad=True)
    loss, metrics = clipped_surrogate(inputs(leaf, leaf.detach(), advantages, dual=3.0))
    loss.sum().backward()
    negated = [-advantage for advantage in advantages]
    assert loss.tolist() == negated
    assert leaf.grad.tolist() == negated
    assert not metrics["pg_clipfrac"].any() and not metrics["ppo_kl"].any()


def test_masked_tokens_have_no_gradient_whatever_they_hold():
    leaf = torch.tensor([-1.0, math.nan, -math.inf, -2.0], dtype=torch.float64, requires_grad=True)
    old = [-1.0, 0.0, 0.0, math.nan]
    loss, metrics = clipped_surrogate(inputs(leaf, old, [2.0, 5.0, math.inf, math.nan], mask=[1, 0, 0, 0], dual=3.0))
    loss.sum().backward()
    assert loss.tolist() == [-2.0, 0.0, 0.0, 0.0]
    assert leaf.grad.tolist() == [-2.0, 0.0, 0.0, 0.0]
    assert all(torch.isfinite(metric).all() for metric in metrics.values())


def test_a_nan_on_a_trained_token_is_not_hidden():
    loss, _ = clipped_surrogate(inputs([math.nan, 0.0], [0.0, 0.0], [1.0, 1.0]))
    assert loss.isnan().tolist() == [True, False]


def test_huge_log_ratios_are_bounded():
    leaf = torch.tensor([0.0, -1000.0], dtype=torch.float64, requires_grad=True)
    loss, _ = clipped_surrogate(inputs(leaf, [-1000.0, 0.0], [-1.0, 1.0]))
    loss.sum().backward()
    torch.testing.assert_close(loss.tolist(), [math.exp(20), -math.exp(-20)])
    assert leaf.grad.tolist() == [0.0, 0.0]


def test_metrics_carry_no_gradient():
    leaf = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    _, metrics = clipped_surrogate(inputs(leaf, [-1.5], [1.0]))
    assert set(metrics) == {"pg_clipfrac", "ppo_kl"}
    assert not any(metric.requires_grad for metric in metrics.values())


@given(st.lists(TOKEN, min_size=2, max_size=12), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_tokens_do_not_see_each_other(tokens, random):
    order = list(range(len(tokens)))
    random.shuffle(order)
    whole, _ = clipped_surrogate(inputs(*zip(*tokens, strict=True), dual=3.0))
    moved, _ = clipped_surrogate(inputs(*zip(*(tokens[i] for i in order), strict=True), dual=3.0))
    assert moved.tolist() == whole[order].tolist()
    first, _ = clipped_surrogate(inputs(*zip(*tokens[:1], strict=True), dual=3.0))
    assert first.tolist() == whole[:1].tolist()
