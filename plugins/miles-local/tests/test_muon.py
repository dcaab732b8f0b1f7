"""Directions of matrices, and how Muon's steps follow from them and from options by Megatron-LM's names."""

from __future__ import annotations

import math

import pytest
import torch
from miles_local.muon import QUINTIC, Steps, orthogonalized
from miles_testing.singular_values import on_singular_values

PLAIN = Steps(momentum=0.9, use_nesterov=False, num_ns_steps=5, scale_mode="spectral", extra_scale_factor=1.0,
              fp32_matmul_prec="highest")


@pytest.mark.parametrize("steps", [1, 5, 7])
@pytest.mark.parametrize("shape", [(1, 1), (16, 16), (40, 12), (12, 40), (1, 30), (3, 40, 12), (3, 12, 40)])
def test_a_matrix_and_each_of_a_stack_is_what_the_polynomials_make_of_its_singular_values(shape, steps):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 1e-4
    expected = on_singular_values(matrices, steps, QUINTIC)
    torch.testing.assert_close(orthogonalized(matrices, steps, torch.float32).double(), expected, rtol=0, atol=2e-5)
    low = orthogonalized(matrices, steps, torch.bfloat16)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.double(), expected, rtol=0, atol=0.05)


def test_five_steps_bring_all_singular_values_near_one():
    """And nothing stays nothing, which a step on gradients of 0 asks for."""
    ones = torch.linalg.svdvals(orthogonalized(torch.randn(48, 32, generator=torch.Generator().manual_seed(0)), 5,
                                               torch.float32))
    assert ones.min() > 0.6 and ones.max() < 1.25
    assert not orthogonalized(torch.zeros(4, 3), 5, torch.bfloat16).any()


def test_momentum_and_what_nesterov_looks_ahead_to():
    gradient, momentum = torch.full((2, 3), 5.0), torch.ones(2, 3)
    assert PLAIN.ahead(momentum, gradient) is momentum
    torch.testing.assert_close(momentum, torch.full((2, 3), 0.9 + 0.5))
    ahead = Steps(0.9, True, 5, "spectral", 1.0, "highest").ahead(momentum, gradient)
    torch.testing.assert_close(momentum, torch.full((2, 3), 0.9 * 1.4 + 0.5))
    torch.testing.assert_close(ahead, 0.9 * momentum + 0.5)


@pytest.mark.parametrize(("mode", "outputs", "inputs", "ratio"), [
    ("spectral", 12, 20, 20), ("spectral", 20, 12, 20), ("unit_rms_norm", 12, 20, 0.6), ("shape_scaling", 12, 20, 1),
    ("shape_scaling", 20, 12, 20 / 12)])
def test_scales_are_roots_of_sizes(mode, outputs, inputs, ratio):
    steps = Steps(0.9, False, 5, mode, 0.2, "highest")
    assert steps.scale(outputs, inputs) == pytest.approx(0.2 * math.sqrt(ratio))


def test_precision_is_torchs_inside_and_what_it_was_after():
    before = torch.get_float32_matmul_precision()
    medium = Steps.of(type("Options", (), {f"muon_{name}": getattr(PLAIN, name) for name in Steps.__slots__}
                           | {"muon_fp32_matmul_prec": "medium"}))
    with pytest.raises(ZeroDivisionError), medium.products():
        assert torch.get_float32_matmul_precision() == "medium"
        1 / 0  # noqa: B018
    assert torch.get_float32_matmul_precision() == before
    assert medium.orthogonalized(torch.eye(3)).dtype == torch.bfloat16
    assert PLAIN.orthogonalized(torch.eye(3)).dtype == torch.float32
