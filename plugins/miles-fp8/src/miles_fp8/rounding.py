"""The numbers: a matrix to FP8 with scales and back, per tile, on any device."""

from __future__ import annotations

import torch

from miles_core.errors import CheckpointError
from miles_fp8 import nvfp4
from miles_fp8.recipe import Tiles

MOST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""Largest finite value of each format (Micikevicius et al., arXiv:2209.05433)."""
BIAS = 127
"""Of UE8M0: the byte e stands for 2^(e - 127) (OCP Microscaling Formats 1.0, section 5.4.1)."""


def quantise(x: torch.Tensor, tiles: Tiles, dtype: torch.dtype = torch.float8_e4m3fn,
             ) -> tuple[torch.Tensor, torch.Tensor]:
    """x [R, C] of any floating dtype -> its tiles over their scales, and the scales: amax / MOST of each tile.

    A tile of zeros has the scale 1. What is not finite makes its tile NaN.

    Returns:
        [R, C] of `dtype`, and float32 [ceil(R / rows), ceil(C / columns)], or [] for one tile.
    """
    wide, most = _cut(x.detach().float(), tiles), MOST[dtype]
    scale = wide.abs().amax((1, 3)) / most
    if tiles.powers:
        scale = torch.exp2(_exponent(scale))
    scale = torch.where(scale == 0, 1.0, scale)
    cut = (wide / scale[:, None, :, None]).clamp_(-most, most).to(dtype)
    return _joined(cut, x.shape), scale if tiles.rows else scale.view(())


def dequantise(x: torch.Tensor, scale: torch.Tensor, tiles: Tiles, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The inverse: [R, C] of `dtype`, the product rounded once.

    Args:
        scale: as `quantise` returns it, or its bytes of UE8M0.

    Raises:
        CheckpointError: as many scales as other tiles have.
    """
    scale = from_bytes(scale) if scale.dtype in (torch.uint8, torch.float8_e8m0fnu) else scale.float()
    if scale.numel() == 1:
        return (x.float() * scale.view(())).to(dtype)
    wide = _cut(x.float(), tiles)
    if scale.shape != wide.shape[::2]:  # scales of rows, say, would be broadcast
        raise CheckpointError("an FP8 weight has other scales than config.json says", code="fp8-scales-differ",
                              got=f"{[*scale.shape]} scales of a weight {[*x.shape]}, not {[*wide.shape[::2]]}",
                              fix="correct weight_block_size in config.json, or use another checkpoint")
    return _joined(wide * scale[:, None, :, None], x.shape).to(dtype)


def rounded(x: torch.Tensor, tiles: Tiles, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    """x [..., C] as FP8 holds it, or NVFP4, in its own dtype; leading axes are rows."""
    if tiles.four_bits:
        return nvfp4.rounded(x)
    flat = x.detach().reshape(-1, x.shape[-1])
    if not flat.numel():
        return x.detach()
    quantised, scale = quantise(flat, tiles, dtype)
    return dequantise(quantised, scale, tiles, x.dtype).view(x.shape)


def to_bytes(scale: torch.Tensor) -> torch.Tensor:
    """Powers of two -> uint8 of UE8M0."""
    return (torch.log2(scale).round() + BIAS).to(torch.uint8)


def from_bytes(scale: torch.Tensor) -> torch.Tensor:
    """The inverse, float32."""
    return torch.exp2(scale.view(torch.uint8).float() - BIAS)


def _exponent(scale: torch.Tensor) -> torch.Tensor:
    """The least e with 2^e >= scale, as UE8M0 has it; a zero's is that of 1."""
    mantissa, exponent = torch.frexp(scale)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-BIAS + 1, BIAS)
    return torch.where(scale == 0, 0, exponent).float() + (scale - scale)  # NaN and infinity stay NaN


def _cut(x: torch.Tensor, tiles: Tiles) -> torch.Tensor:
    """[R, C] -> [row tiles, rows, column tiles, columns], zeros beyond the edges."""
    rows, columns = tiles.rows or max(1, x.shape[0]), tiles.columns or max(1, x.shape[1])
    pad = (-x.shape[1] % columns, -x.shape[0] % rows)
    x = torch.nn.functional.pad(x, (0, pad[0], 0, pad[1])) if any(pad) else x
    return x.reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)


def _joined(x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    whole = x.reshape(x.shape[0] * x.shape[1], -1)
    return whole[: shape[0], : shape[1]].contiguous()
