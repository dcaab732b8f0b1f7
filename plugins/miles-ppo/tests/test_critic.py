"""The clipped value loss against float64 by hand, by a formula of its own and by finite differences; the metrics."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_ppo.critic import clipped_value_loss, return_metrics
from miles_testing.batches import make_sample
from miles_testing.losses import inputs_of, make_case

CLIP = 0.2


def inputs(values, old, returns, mask=None):
    """LossInputs of one sample whose critic says `values` [N]."""
    case = make_case([len(old)], 0)
    made = inputs_of(case, torch.as_tensor(case.log_probs))
    rows = {"values": torch.as_tensor(old, dtype=values.dtype), "returns": torch.as_tensor(returns, dtype=values.dtype)}
    mask = torch.ones(len(old), dtype=values.dtype) if mask is None else torch.as_tensor(mask, dtype=values.dtype)
    return type(made)(**{**{name: getattr(made, name) for name in made.__slots__}, "values": values, "rows": rows,
                         "mask": mask})


def evaluate(values, old, returns, mask=None):
    leaf = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    loss, metrics = clipped_value_loss(inputs(leaf, old, returns, mask), CLIP)
    return loss, torch.autograd.grad(loss.sum(), leaf)[0], metrics


def test_five_values_by_hand():
    """V_old = 1 and G = 2, save the last: unmoved; inside; too far towards G (clipped, no gradient); away; past G."""
    loss, gradient, metrics = evaluate([1.0, 1.1, 1.5, 0.5, 3.0], [1.0] * 5, [2.0] * 5)
    np.testing.assert_allclose(loss.detach(), [1.0, 0.81, 0.64, 2.25, 1.0], rtol=1e-12)
    np.testing.assert_allclose(gradient, [-2.0, -1.8, 0.0, -3.0, 2.0], rtol=1e-12)
    assert metrics["value_clipfrac"].tolist() == [0, 0, 1, 0, 0]
    torch.testing.assert_close(metrics["value_loss"], loss.detach())
    assert not any(metric.requires_grad for metric in metrics.values())


def test_masked_rows_have_no_loss_and_no_gradient_whatever_they_hold():
    nan = float("nan")
    loss, gradient, metrics = evaluate([nan, 1.1, 5.0], [1.0, 1.0, nan], [2.0, 2.0, nan], mask=[0, 1, 0])
    assert loss.tolist() == [0, pytest.approx(0.81), 0] and gradient.tolist() == [0, pytest.approx(-1.8), 0]
    assert not metrics["value_clipfrac"].any()
    assert evaluate([nan], [1.0], [2.0])[0].isnan().all(), "a NaN of a trained token is not hidden"


NUMBER = st.floats(-3, 3)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(NUMBER, NUMBER, NUMBER), min_size=1, max_size=6))
def test_it_is_the_formula_and_its_gradient_the_slope(rows):
    values, old, returns = np.array(rows).T
    loss, gradient, metrics = evaluate(values, old, returns)

    def by_numpy(values):
        clipped = np.clip(values, old - CLIP, old + CLIP)
        return np.maximum((clipped - returns) ** 2, (values - returns) ** 2)

    np.testing.assert_allclose(loss.detach(), by_numpy(values), rtol=1e-9, atol=1e-12)
    step = 1e-6
    slopes = (by_numpy(values + step) - by_numpy(values - step)) / (2 * step)
    # Not at the kinks: where the value is at the band's edge, or both errors are equal though it is outside.
    edge = np.abs(np.abs(values - old) - CLIP) < 1e-4
    outside = np.abs(values - old) > CLIP
    both = np.abs((np.clip(values, old - CLIP, old + CLIP) - returns) ** 2 - (values - returns) ** 2) < 1e-4
    smooth = ~(edge | (outside & both))
    np.testing.assert_allclose(gradient.numpy()[smooth], slopes[smooth], rtol=1e-5, atol=1e-6)
    assert set(metrics) == {"value_loss", "value_clipfrac"}


def test_explained_variance_by_hand():
    """Returns 0, 2, 4 (variance 8/3), errors 0, 0, 1 (variance 2/9): 1 - 1/12. A masked return of 100 is not seen."""
    samples = [make_sample(0, 0, 0.0, (1, 1, 0), values=[0, 2, 0], returns=[0, 2, 100]),
               make_sample(0, 1, 0.0, (1,), values=[3], returns=[4])]
    assert return_metrics(samples) == pytest.approx({"rollout/returns": 2.0, "rollout/explained_variance": 11 / 12})


def test_returns_that_are_all_equal_leave_nothing_to_explain():
    made = [make_sample(0, 0, 0.0, (1, 1), values=[0, 2], returns=[1, 1])]
    assert return_metrics(made) == {"rollout/returns": 1.0}
    assert return_metrics([make_sample(0, 0, 0.0, (0,), values=[0], returns=[0])]) == {}
