"""The hook obeys the core's options; the maths is tested where it is, in tests/unit/stages/test_group_relative.py."""

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from miles_grpo.plugin import Grpo
from miles_testing.batches import make_batch

from miles_core.config.tables import Algorithm, Rollout, RunConfig


def advantage(batch, **options):
    return Grpo(RunConfig(algorithm=Algorithm(**options))).advantage(batch)


def test_rewards_relative_to_their_group_in_the_order_of_the_batch():
    """Group 1: mean 0.5, std sqrt(0.5); group 2: equal rewards."""
    unit = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert advantage(make_batch([1.0, 0.0], [3.0, 3.0])) == pytest.approx([unit, -unit, 0, 0], rel=1e-12)


def test_dr_grpo_is_an_option():
    assert advantage(make_batch([1.0, 4.0]), std_normalization=False) == [-1.5, 1.5]
    assert advantage(make_batch([1.0, 4.0]), rewards_normalization=False) == [1.0, 4.0]


def of_scorers(*groups, weights=(1.0, 0.5), shaped=0.0, **options):
    """gdpo's advantages of groups whose samples have these rewards of two scorers; `shaped` is added to the first."""
    names = ["first", "second"]
    batch = make_batch(*([math.fsum(w * r for w, r in zip(weights, pair)) for pair in group] for group in groups))
    for sample, pair in zip(batch.samples, [pair for group in groups for pair in group], strict=True):
        sample.rewards = dict(zip(names, pair, strict=True))
        sample.reward = sum(w * r for w, r in zip(weights, pair))
    batch.samples[0].reward += shaped
    rollout = Rollout(rm_type=names, rm_weights=list(weights))
    return Grpo(RunConfig(algorithm=Algorithm(**options), rollout=rollout)).decoupled(batch)


def reference(groups, weights):
    """The same by numpy, in the terms of the paper."""
    sums = []
    for group in np.asarray(groups):
        relative = (group - group.mean(0)) / (group.std(0, ddof=1) + 1e-6)
        sums.append(relative @ np.asarray(weights))
    whole = np.concatenate(sums)
    return (whole - whole.mean()) / (whole.std(ddof=1) + 1e-6)


@given(st.lists(st.lists(st.tuples(*[st.sampled_from([0.0, 0.1, 1.0, 5.0])] * 2), min_size=4, max_size=4), min_size=1,
                max_size=3), st.tuples(*[st.sampled_from([0.2, 1.0, 3.0])] * 2))
def test_rewards_of_scorers_are_compared_apart(groups, weights):
    expected = reference(groups, weights)
    assert of_scorers(*groups, weights=weights) == pytest.approx(expected, abs=1e-6)


def test_what_sums_cannot_tell_apart_is_apart():
    """Sums of 1 and 1: `grpo` gives both 0. The second scorer's rewards are rarer and so tell more."""
    group = [(1.0, 0.0), (0.0, 1.0), (1.0, 0.0), (0.0, 0.0)]
    values = of_scorers(group, weights=(1.0, 1.0))
    assert values[1] > values[0] == values[2] > 0 > values[3]


def test_a_penalty_beside_the_scorers_counts_as_one_more():
    group = [(1.0, 0.0), (1.0, 0.0), (0.0, 0.0), (0.0, 0.0)]
    without, punished = of_scorers(group), of_scorers(group, shaped=-0.5)
    assert without[0] == without[1] and punished[0] < punished[1]


def test_scorers_that_agree_teach_nothing():
    assert of_scorers([(1.0, 0.1)] * 3, [(0.0, 5.0)] * 3) == [0.0] * 6


def test_kl_in_the_reward_is_taken_off_token_by_token():
    batch = make_batch([1.0, 4.0], log_probs=[-1.0, -2.0], ref_log_probs=[-1.5, -1.0])
    found = advantage(batch, std_normalization=False, kl_coef=0.1)
    assert [row.tolist() for row in found] == [pytest.approx([-1.55, -1.4]), pytest.approx([1.45, 1.6])]


def test_the_plugin_module_imports_no_torch():
    code = f"import sys; sys.path[:] = {sys.path!r}; import miles_grpo.plugin; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
