"""Numbers: symmetric groups of int4 along a weight's input axis, their packing, and the straight-through gradient.

One function quantises, for the forward, for the weight stream and for a conversion, so all three have the same bits.
"""

from __future__ import annotations

from typing import Any

import torch

LARGEST = 7
"""int4 holds -8 to 7; a symmetric range leaves -8 out."""
FLOOR = 1e-5
"""Smallest scale: a group of zeros has one, too."""
NIBBLES = 8
"""Values in one int32."""
OFFSET = 8
"""Added to a value before it is packed, which makes it unsigned."""
PIECE = 1 << 26
"""Weights that are quantised at once, which bounds the memory for their float32 copies."""


def quantise(weight: torch.Tensor, group_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to the nearest multiple of each group's scale, max(max|w| / 7, 1e-5).

    Jacob et al., arXiv:1712.05877, section 2, with a zero point of 0. The division is by the scale that is stored,
    after its rounding to `dtype`; nothing is cut off: the largest value of a group is within half a step of 7 scales.

    Args:
        weight: [..., in].
        dtype: of the scales.

    Returns:
        values [..., in] int8 in -7 ... 7, and scales [..., in / group_size].

    Raises:
        ValueError: groups do not divide the input axis.
    """
    if weight.numel() > PIECE and weight.dim() > 1 and len(weight) > 1:
        parts = [quantise(part, group_size, dtype) for part in weight.chunk(-(-weight.numel() // PIECE))]
        return torch.cat([values for values, _ in parts]), torch.cat([scale for _, scale in parts])
    wide = _grouped(weight.detach(), group_size).to(torch.promote_types(weight.dtype, torch.float32))
    scale = (wide.abs().amax(-1) / LARGEST).clamp_min(FLOOR).to(dtype)
    values = (wide / scale.to(wide.dtype).unsqueeze(-1)).round_().clamp_(-LARGEST, LARGEST)
    return values.to(torch.int8).flatten(-2), scale


def dequantise(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Values times scales, rounded once to the scales' dtype, as engines compute it.

    Args:
        values: [..., in] int8.
        scale: [..., in / group_size].
        dtype: of the result; the scales' by default.
    """
    wide = _grouped(values, values.shape[-1] // scale.shape[-1]).to(scale.dtype) * scale.unsqueeze(-1)
    return wide.flatten(-2).to(dtype or scale.dtype)


def pack(values: torch.Tensor) -> torch.Tensor:
    """[..., in] int8 -> [..., in / 8] int32, the first value in the lowest bits."""
    nibbles = (values.to(torch.int32) + OFFSET).unflatten(-1, (-1, NIBBLES))
    packed = torch.zeros(nibbles.shape[:-1], dtype=torch.int32, device=values.device)
    for i in range(NIBBLES):
        packed |= nibbles[..., i] << (4 * i)
    return packed


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack`."""
    shifts = torch.arange(0, 4 * NIBBLES, 4, dtype=torch.int32, device=packed.device)
    return (((packed.unsqueeze(-1) >> shifts) & 15) - OFFSET).to(torch.int8).flatten(-2)


def rounded(weight: torch.Tensor, group_size: int, dtype: torch.dtype) -> torch.Tensor:
    """What is left of a weight when it has been stored: [..., in] of the same dtype."""
    return dequantise(*quantise(weight, group_size, dtype), weight.dtype)


def fake_quantised(group_size: int, dtype: torch.dtype, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`rounded` of each, with the gradient that the weights would get without it.

    The straight-through estimator (Bengio, Léonard and Courville, arXiv:1308.3432, section 4). It is the identity
    everywhere, since no weight lies outside of its group's range.

    Args:
        weights: [out, in] each, all of one shape.
    """
    return _FakeQuantised.apply(group_size, dtype, *weights)


class _FakeQuantised(torch.autograd.Function):
    """Keeps nothing for the backward."""

    @staticmethod
    def forward(ctx: Any, group_size: int, dtype: torch.dtype, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        at_once = max(1, PIECE // weights[0].numel())
        if at_once == 1 or len(weights) == 1:
            return tuple(rounded(weight, group_size, dtype) for weight in weights)
        # A mixture's many small matrices in few kernels.
        return tuple(one for start in range(0, len(weights), at_once)
                     for one in rounded(torch.stack(weights[start : start + at_once]), group_size, dtype).unbind())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *gradients


def _grouped(tensor: torch.Tensor, group_size: int) -> torch.Tensor:
    """[..., in] -> [..., in / group_size, group_size]."""
    if not group_size or tensor.shape[-1] % group_size:
        raise ValueError(f"groups of {group_size} do not divide an input axis of {tensor.shape[-1]}")
    return tensor.unflatten(-1, (-1, group_size))
