"""The hook obeys the core's options; the maths is tested where it is, in tests/unit/stages/test_group_relative.py."""

import math
import subprocess
import sys

import pytest
from miles_grpo.plugin import Grpo
from miles_testing.batches import make_batch

from miles_core.config.tables import Algorithm, RunConfig


def advantage(batch, **options):
    return Grpo(RunConfig(algorithm=Algorithm(**options))).advantage(batch)


def test_rewards_relative_to_their_group_in_the_order_of_the_batch():
    """Group 1: mean 0.5, std sqrt(0.5); group 2: equal rewards."""
    unit = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert advantage(make_batch([1.0, 0.0], [3.0, 3.0])) == pytest.approx([unit, -unit, 0, 0], rel=1e-12)


def test_dr_grpo_is_an_option():
    assert advantage(make_batch([1.0, 4.0]), std_normalization=False) == [-1.5, 1.5]
    assert advantage(make_batch([1.0, 4.0]), rewards_normalization=False) == [1.0, 4.0]


def test_kl_in_the_reward_is_taken_off_token_by_token():
    batch = make_batch([1.0, 4.0], log_probs=[-1.0, -2.0], ref_log_probs=[-1.5, -1.0])
    found = advantage(batch, std_normalization=False, kl_coef=0.1)
    assert [row.tolist() for row in found] == [pytest.approx([-1.55, -1.4]), pytest.approx([1.45, 1.6])]


def test_the_plugin_module_imports_no_torch():
    code = f"import sys; sys.path[:] = {sys.path!r}; import miles_grpo.plugin; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
