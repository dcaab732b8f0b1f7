"""GSPO against hand-computed values and an independent loop, loss and gradient; its invariances are the contract's."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from miles_gspo.loss import sequence_surrogate
from miles_gspo.plugin import Gspo
from miles_testing.batches import make_batch
from miles_testing.losses import Case, cases, evaluate, loss_contract

from miles_core.config.tables import Algorithm, RunConfig

torch.set_num_threads(1)


def by_hand(ratios, advantages, sample, mask=None, dual=None):
    """Loss of tokens whose ratios are given."""
    log_ratio = np.log(np.array(ratios))
    zeros = np.zeros(len(ratios))
    case = Case(log_ratio, zeros, zeros, zeros, np.array(advantages, float), np.ones(len(ratios)) if mask is None
                else np.array(mask, float), np.array(sample), np.ones(max(sample) + 1), dual)
    return evaluate(sequence_surrogate, case)


def test_the_ratio_is_the_geometric_mean_over_the_sequence():
    """(1.1 x 1.1)^(1/2) = 1.1 inside the band; (2 x 0.5)^(1/2) = 1; (2 x 2)^(1/2) = 2, clipped to 1.28."""
    found = by_hand([1.21, 1.0, 2.0, 0.5, 2.0, 2.0], [1.0, 1.0, 3.0, 3.0, 1.0, 1.0], [0, 0, 1, 1, 2, 2])
    assert found.values.tolist() == pytest.approx([-1.1, -1.1, -3, -3, -1.28, -1.28])
    assert found.metrics["pg_clipfrac"].tolist() == [0, 0, 0, 0, 1, 1]
    assert found.metrics["ppo_kl"].tolist() == pytest.approx([-math.log(1.1)] * 2 + [0, 0] + [-math.log(2)] * 2)


def test_a_masked_token_is_no_part_of_the_mean():
    found = by_hand([1.2, 5.0], [1.0, 1.0], [0, 0], mask=[1, 0])
    assert found.values.tolist() == pytest.approx([-1.2, 0])


def test_the_dual_clip_bounds_a_sequence():
    found = by_hand([4.0, 4.0], [-1.0, -1.0], [0, 0], dual=3.0)
    assert found.values.tolist() == pytest.approx([3.0, 3.0]) and not found.gradient.any()


def reference(case):
    """Losses and their gradient, sequence by sequence, in plain floats."""
    size = len(case.mask)
    values, gradient = [0.0] * size, [0.0] * size
    for one in range(len(case.weights)):
        rows = [i for i in range(size) if case.sample[i] == one and case.mask[i]]
        if not rows:
            continue
        mean = sum(case.log_probs[i] - case.old[i] for i in rows) / len(rows)
        ratio, slope = math.exp(mean), 0.0
        for i in rows:
            advantage = case.advantages[i]
            clipped = ratio > 1.28 if advantage >= 0 else ratio < 0.8
            dual = case.dual is not None and advantage < 0 and ratio > case.dual
            edge = 1.28 if advantage >= 0 else 0.8
            values[i] = -(case.dual if dual else edge if clipped else ratio) * advantage
            slope += 0.0 if clipped or dual else -ratio * advantage * case.weights[one]
        for i in rows:
            gradient[i] = slope / len(rows)
    return values, gradient


@given(cases())
@settings(deadline=None, max_examples=60)
def test_agrees_with_the_independent_loop(case):
    found, (values, gradient) = evaluate(sequence_surrogate, case), reference(case)
    assert found.values.tolist() == pytest.approx(values, rel=1e-12, abs=1e-12)
    assert found.gradient.tolist() == pytest.approx(gradient, rel=1e-12, abs=1e-12)


def test_contract():
    loss_contract(sequence_surrogate, examples=10)


def test_the_estimator_is_group_relative():
    unit = 0.5 / (math.sqrt(0.5) + 1e-6)
    plugin = Gspo(RunConfig())
    assert plugin.advantage(make_batch([1.0, 0.0])) == pytest.approx([unit, -unit])
    plain = Gspo(RunConfig(algorithm=Algorithm(std_normalization=False)))
    assert plain.advantage(make_batch([1.0, 0.0])) == [0.5, -0.5]


def test_the_plugin_module_imports_no_torch():
    code = f"import sys; sys.path[:] = {sys.path!r}; import miles_gspo.plugin; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
