"""MXFP4, as checkpoints hold it: blocks of 32 fp4 numbers with one power of two (OCP Microscaling Formats 1.0)."""

from __future__ import annotations

import torch

BLOCKS, SCALES = "_blocks", "_scales"
"""Ends of the names of a tensor's two parts."""

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1
_BIAS = 127  # of E8M0


def dequantised(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What the two parts stand for; every value of it is one of bfloat16.

    Args:
        blocks: [..., blocks, 16] uint8; a byte has two numbers, the first in its lower half.
        scales: [..., blocks] uint8, an exponent of 2.

    Returns:
        [..., blocks * 32] bfloat16.
    """
    values = torch.tensor((*_POSITIVE, *(-one for one in _POSITIVE)), dtype=torch.bfloat16, device=blocks.device)
    pairs = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).int()
    return torch.ldexp(values[pairs], scales[..., None].int() - _BIAS).flatten(-2)
