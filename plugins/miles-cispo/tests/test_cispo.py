"""CISPO against hand-computed values and an independent loop, loss and gradient; its invariances are the contract's."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from miles_cispo.loss import weighted_log_likelihood
from miles_cispo.plugin import Cispo
from miles_testing.batches import make_batch
from miles_testing.losses import Case, cases, evaluate, loss_contract

from miles_core.config.tables import RunConfig

torch.set_num_threads(1)


def test_by_hand():
    """Weights clip(2) = 1.28, clip(0.5) = 0.8 and 1.1; old log-prob -1. The gradient is -weight x A everywhere."""
    old, advantages = np.full(3, -1.0), np.array([1.0, -2.0, 3.0])
    log_probs = old + np.log([2.0, 0.5, 1.1])
    case = Case(log_probs, old, old, old, advantages, np.ones(3), np.zeros(3, int), np.ones(1))
    found = evaluate(weighted_log_likelihood, case)
    weights = np.array([1.28, 0.8, 1.1])
    assert found.values.tolist() == pytest.approx((-weights * advantages * log_probs).tolist())
    assert found.gradient.tolist() == pytest.approx((-weights * advantages).tolist())
    assert found.metrics["pg_clipfrac"].tolist() == [1, 1, 0]
    assert found.metrics["ppo_kl"].tolist() == pytest.approx([-math.log(2), math.log(2), -math.log(1.1)])


@given(cases())
@settings(deadline=None, max_examples=60)
def test_agrees_with_the_independent_loop(case):
    found = evaluate(weighted_log_likelihood, case)
    for i in range(len(case.mask)):
        ratio = math.exp(min(max(case.log_probs[i] - case.old[i], -20.0), 20.0))
        slope = -min(max(ratio, 0.8), 1.28) * case.advantages[i] if case.mask[i] else 0.0
        value = slope * case.log_probs[i] if case.mask[i] else 0.0
        assert found.values[i] == pytest.approx(value, rel=1e-12, abs=1e-12)
        assert found.gradient[i] == pytest.approx(slope * case.weights[case.sample[i]], rel=1e-12, abs=1e-12)


@given(cases())
@settings(deadline=None, max_examples=20)
def test_the_gradient_is_that_of_the_value_with_the_weights_held(case):
    """Finite differences of the sum whose weights come from the unshifted log-probs."""
    ratio = np.exp(case.log_probs - case.old).clip(0.8, 1.28)
    slopes, step = [], 1e-6
    for shift in step * np.eye(len(case.mask)):
        ends = [(-ratio * case.advantages * (case.log_probs + side * shift) * case.mask) @ case.weights[case.sample]
                for side in (1, -1)]
        slopes.append((ends[0] - ends[1]) / (2 * step))
    np.testing.assert_allclose(evaluate(weighted_log_likelihood, case).gradient, slopes, rtol=1e-6, atol=1e-8)


def test_contract():
    loss_contract(weighted_log_likelihood, stops_gradient=True, examples=10)


def test_the_estimator_is_group_relative():
    unit = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert Cispo(RunConfig()).advantage(make_batch([1.0, 0.0])) == pytest.approx([unit, -unit])


def test_the_plugin_module_imports_no_torch():
    code = f"import sys; sys.path[:] = {sys.path!r}; import miles_cispo.plugin; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
