"""Where liger-kernel is installed, the trainer fsdp computes gated activations by its kernels."""

import pytest


@pytest.mark.parametrize("tensor", ["activated", "gate", "up"])
def test_its_activation_and_both_gradients_are_those_without_it(found, tensor):
    assert found[tensor] < 2e-6
