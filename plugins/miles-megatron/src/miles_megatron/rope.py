"""The rotary position embedding: tables of angles, and the turn of queries and keys by them."""

from __future__ import annotations

import math

import torch

from miles_megatron.specs import Rotary


class Rotate(torch.autograd.Function):
    """x [..., d], cos and sin [..., r/2] -> the first r channels turned pair by pair; backward turns back.

    A pair is (x[i], x[i + r/2]), or (x[2i], x[2i + 1]) where interleaved.
    """

    @staticmethod
    def forward(ctx, x, cos, sin, interleaved):
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _turn(x, cos, sin, 1, interleaved)

    @staticmethod
    def backward(ctx, grad):
        return _turn(grad, *ctx.saved_tensors, -1, ctx.interleaved), None, None, None


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int, interleaved: bool) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    turned = 2 * cos.shape[-1]
    if turned < x.shape[-1]:
        out[..., turned:] = x[..., turned:]
    first, second = _pairs(x[..., :turned], interleaved)
    to_first, to_second = _pairs(out[..., :turned], interleaved)
    # Products rounded before they are added, as the engine does it: addcmul would fuse them.
    torch.mul(first, cos, out=to_first).add_(second * sin, alpha=-sign)
    torch.mul(second, cos, out=to_second).add_(first * sin, alpha=sign)
    return out


def _pairs(x: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)


class Rope:
    """The angles of one rotary embedding; all layers that share it share one.

    Args:
        dim: channels of a head.
        rotary: what the checkpoint says.
    """

    def __init__(self, dim: int, rotary: Rotary):
        self.interleaved = rotary.interleaved
        self.magnitude = rotary.magnitude
        turned = int(dim * rotary.fraction + 1e-6)
        if rotary.scaling == "proportional":
            self.inverse_frequency = _inverse_frequency(dim, rotary)
            self.inverse_frequency[turned // 2:] = 0.0
        else:
            self.inverse_frequency = _inverse_frequency(turned, rotary)
        count = len(self.inverse_frequency)
        self.axes = torch.tensor([*rotary.axes, *[0] * count][:count])
        self._angles: torch.Tensor | None = None

    def tables(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [N], or [axes, N] -> cos and sin [N, r/2] times the magnitude, r the channels that are turned; made
        in fp32."""
        along = positions[self.axes.to(positions.device)].t() if positions.dim() == 2 else positions[:, None]
        angles = along.float() * self.inverse_frequency.to(positions.device)
        return tuple((table * self.magnitude).to(dtype) for table in (angles.cos(), angles.sin()))

    def angles(self, count: int, device: torch.device) -> torch.Tensor:
        """[count or more, 1, 1, r] fp32 of the positions from 0, each pair's angle twice: Transformer Engine's form.

        Cached, and recomputed only for a longer sequence.
        """
        if self._angles is None or len(self._angles) < count or self._angles.device != device:
            angles = torch.outer(torch.arange(count, device=device).float(), self.inverse_frequency.to(device))
            twice = angles.repeat_interleave(2, -1) if self.interleaved else torch.cat([angles, angles], -1)
            self._angles = twice[:, None, None]
        return self._angles


def _inverse_frequency(dim: int, rotary: Rotary) -> torch.Tensor:
    """[dim/2] radians per position."""
    plain = 1.0 / (rotary.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if rotary.scaling == "default":
        return plain
    slow = plain / rotary.factor
    if rotary.scaling in ("linear", "proportional"):
        return slow
    if rotary.scaling == "yarn":
        keep = 1 - _ramp(dim, rotary)
        return slow * (1 - keep) + plain * keep
    # Llama 3: waves longer than original / low are slowed, shorter ones than original / high stay, in between a blend.
    turns = rotary.original * plain / (2 * math.pi)
    keep = ((turns - rotary.low) / (rotary.high - rotary.low)).clamp(0, 1)
    return (1 - keep) * slow + keep * plain


def _ramp(dim: int, rotary: Rotary) -> torch.Tensor:
    """[dim/2] 0 up to the channel that makes `high` turns over the original positions, 1 from that of `low` on."""
    def channel(turns: float) -> float:
        return dim * math.log(rotary.original / (turns * 2 * math.pi)) / (2 * math.log(rotary.theta))

    first, last = channel(rotary.high), channel(rotary.low)
    if rotary.whole:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    last += 0.001 * (first == last)  # a step rather than 0 / 0
    return ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
