"""SAPO against hand-computed values and an independent loop, loss and gradient; its invariances are the contract's."""

import math
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from miles_sapo.loss import gated_surrogate
from miles_sapo.plugin import Sapo, SapoOptions
from miles_testing.batches import make_batch
from miles_testing.losses import Case, cases, evaluate, loss_contract

from miles_core.config.tables import RunConfig

torch.set_num_threads(1)
loss = partial(gated_surrogate, positive=1.0, negative=1.05)


def test_by_hand():
    """At ratio 1 the gate is 2 / tau, its slope 1; at ratio 2 the slope is 4 s (1 - s), s = sigmoid(tau)."""
    old, advantages = np.full(3, -1.0), np.array([1.0, -2.0, 3.0])
    log_probs = old + np.log([1.0, 1.0, 2.0])
    result = evaluate(loss, Case(log_probs, old, old, old, advantages, np.ones(3), np.zeros(3, int), np.ones(1)))
    share = 1 / (1 + math.exp(-1.0))
    assert result.values.tolist() == pytest.approx([-2.0, 4 / 1.05, -12 * share])
    assert result.gradient.tolist() == pytest.approx([-1.0, 2.0, -3 * 2 * 4 * share * (1 - share)])
    assert result.metrics["sapo_gate"].tolist() == pytest.approx([1, 1, 4 * share * (1 - share)])
    assert result.metrics["ppo_kl"].tolist() == pytest.approx([0, 0, -math.log(2)])


@given(cases())
@settings(deadline=None, max_examples=60)
def test_agrees_with_the_independent_loop(case):
    result = evaluate(loss, case)
    for i in range(len(case.mask)):
        far = abs(case.log_probs[i] - case.old[i]) > 20
        ratio = math.exp(min(max(case.log_probs[i] - case.old[i], -20.0), 20.0))
        tau = 1.0 if case.advantages[i] > 0 else 1.05
        share = 1 / (1 + math.exp(-min(tau * (ratio - 1), 700)))
        slope = 0.0 if far or not case.mask[i] else -4 * share * (1 - share) * ratio * case.advantages[i]
        value = -4 / tau * share * case.advantages[i] if case.mask[i] else 0.0
        assert result.values[i] == pytest.approx(value, rel=1e-12, abs=1e-12)
        assert result.gradient[i] == pytest.approx(slope * case.weights[case.sample[i]], rel=1e-9, abs=1e-12)


def test_contract():
    loss_contract(loss, examples=10)


def test_the_estimator_is_group_relative():
    unit = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert Sapo(SapoOptions(), RunConfig()).advantage(make_batch([1.0, 0.0])) == pytest.approx([unit, -unit])


def test_the_plugin_module_imports_no_torch():
    code = f"import sys; sys.path[:] = {sys.path!r}; import miles_sapo.plugin; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
