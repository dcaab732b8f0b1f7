"""The head of a critic: a directory's own, or Megatron's draw."""

import pytest
import torch
from miles_fsdp.value import BIAS, HEAD, head_of
from safetensors.torch import save_file

from miles_core.errors import CheckpointError


def test_a_head_is_the_directorys(tmp_path):
    weight = torch.randn(1, 8)
    save_file({"model.norm.weight": torch.ones(8), HEAD: weight}, tmp_path / "model.safetensors")
    assert torch.equal(head_of(tmp_path, 8, 0, fresh=False).weight, weight)


def test_a_head_is_made_up_for_a_policy_alone(tmp_path):
    """The same for the same seed; a critic that has lost its own is no start."""
    save_file({"model.norm.weight": torch.ones(8)}, tmp_path / "model.safetensors")
    one, same, other = (head_of(tmp_path, 8, seed, fresh=True).weight for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)
    with pytest.raises(CheckpointError) as caught:
        head_of(tmp_path, 8, 1, fresh=False)
    assert caught.value.code == "fsdp-value-head-missing" and HEAD in str(caught.value)


def test_a_head_with_a_bias_is_refused(tmp_path):
    """Values would be off by it; a bias of zeros is none."""
    for value in (0.0, 0.7):
        save_file({HEAD: torch.ones(1, 8), BIAS: torch.tensor([value])}, tmp_path / "model.safetensors")
        if not value:
            head_of(tmp_path, 8, 0, fresh=False)
            continue
        with pytest.raises(CheckpointError) as caught:
            head_of(tmp_path, 8, 0, fresh=False)
        assert caught.value.code == "fsdp-value-head-bias" and "0.69" in str(caught.value)
