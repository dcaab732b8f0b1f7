"""NVFP4: sixteen values of four bits share a scale in E4M3, and a tensor one in float32; on any device.

A value is E2M1: 0, 0.5, 1, 1.5, 2, 3, 4 or 6 with a sign (OCP Microscaling Formats 1.0, section 5.3.3; NVIDIA,
arXiv:2509.25149, section 2). The tensor's scale brings the scales of its blocks into E4M3's range.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

BLOCK = 16
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""By the three bits behind the sign."""
MOST, MOST_OF_SCALE, LEAST_OF_SCALE = VALUES[-1], 448.0, 2.0**-9
"""Largest value, and the largest and the smallest of a block's scale."""

_HALFWAY = tuple((low + high) / 2 for low, high in zip(VALUES[:-1], VALUES[1:], strict=True))


def of_tensors(x: torch.Tensor, part: torch.Tensor | None = None, parts: int = 1,
               group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The scale of the tensor that each row of x [R, C] belongs to, float32: [] of one, else [R].

    Args:
        part: [R] which of several tensors, from 0, that are one parameter here.
        parts: how many these are.
        group: ranks among which the tensors are cut.
    """
    most = x.detach().float().abs().amax(1) if x.numel() else x.new_zeros(x.shape[0])
    if part is None:
        most = most.amax(0, keepdim=True) if len(most) else most.new_zeros(1)
    else:
        most = most.new_zeros(parts).scatter_reduce(0, part, most, "amax")
    if group is not None and group.size() > 1:
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    whole = most / (MOST * MOST_OF_SCALE)
    whole = torch.where(whole.isinf(), torch.nan, torch.where(whole == 0, 1.0, whole))
    return whole.view(()) if part is None else whole[part]


def quantise(x: torch.Tensor, whole: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [R, C] of any floating dtype, C a multiple of 16 -> its bytes, and the scales of blocks and of the tensor.

    A block of zeros has the scale 1, a tensor of zeros too. What is not finite makes the tensor NaN.

    Args:
        whole: of `of_tensors`; by default x is one tensor.

    Returns:
        uint8 [R, C / 2], of two values the first in the lower four bits; float8_e4m3fn [R, C / 16]; float32 [],
        or `whole` as it was given.
    """
    wide = x.detach().float().reshape(x.shape[0], -1, BLOCK)
    most = wide.abs().amax(-1)
    whole = of_tensors(x) if whole is None else whole
    scale = torch.where(most == 0, 1.0, (most / MOST / whole.view(-1, 1)).clamp(LEAST_OF_SCALE, MOST_OF_SCALE))
    scale = scale.to(torch.float8_e4m3fn)
    size = wide / (scale.float() * whole.view(-1, 1))[..., None]
    code = (size.signbit().to(torch.uint8) << 3) | _nearest(size.abs())
    code = code.reshape(x.shape)
    return code[:, 0::2] | (code[:, 1::2] << 4), scale, whole


def dequantise(packed: torch.Tensor, scale: torch.Tensor, whole: torch.Tensor,
               dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The inverse: [R, C] of `dtype`, the product rounded once."""
    code = torch.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1, BLOCK).long()
    table = torch.tensor(VALUES, device=packed.device)
    value = table[code & 7] * torch.where(code > 7, -1.0, 1.0)
    wide = value * (scale.float() * whole.float().view(-1, 1))[..., None]
    return wide.reshape(packed.shape[0], -1).to(dtype)


def rounded(x: torch.Tensor, whole: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., C] as NVFP4 holds it, in its own dtype; leading axes are rows, and the last is filled up with zeros.

    Args:
        whole: see `quantise`.
    """
    flat = x.detach().reshape(-1, x.shape[-1])
    if not flat.numel():
        return x.detach()
    filled = torch.nn.functional.pad(flat, (0, -flat.shape[1] % BLOCK))
    return dequantise(*quantise(filled, whole), x.dtype)[:, : flat.shape[1]].reshape(x.shape)


def _nearest(size: torch.Tensor) -> torch.Tensor:
    """The code of the nearest of VALUES; halfway the even one, and beyond the largest that."""
    code = torch.zeros_like(size, dtype=torch.uint8)
    for number, halfway in enumerate(_HALFWAY):  # the upper one's code is number + 1
        code += size >= halfway if number % 2 else size > halfway
    return code
