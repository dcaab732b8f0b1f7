"""The state space of Mamba-2, in plain torch.

Dao and Gu, Transformers are SSMs, arXiv:2405.21060. A head has a state S [N, P]; a token first lets it decay, then adds
its input to it along b, and reads it along c:

    S_t = exp(dt_t A) S_(t-1) + dt_t b_t x_t^T,    y_t = S_t^T c_t + D x_t

Tokens of one chunk are computed at once, as attention without a softmax (section 6); chunk follows chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from miles_megatron.recurrent import CHUNK, in_chunks, wide


def state_space(x: torch.Tensor, dt: torch.Tensor, decay: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
                skip: torch.Tensor) -> torch.Tensor:
    """Sequences from an empty state.

    Args:
        x: [B, L, heads, P].
        dt: [B, L, heads] time steps, fp32, above 0.
        decay: [heads] A, fp32, below 0.
        b, c: [B, L, groups, N]; each serves heads / groups heads that follow each other.
        skip: [heads] D.

    Returns:
        [B, L, heads, P] in x's dtype; computed in fp32.
    """
    fused = _fused()
    if x.is_cuda and fused is not None:
        return fused(x, dt, decay, b, c, chunk_size=2 * CHUNK, D=skip.float())
    return _chunked(x, dt, decay, b, c, skip)


@functools.cache
def _fused() -> Callable[..., Any] | None:
    """The kernel of the package mamba-ssm where that is installed."""
    try:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    except ImportError:
        return None
    return mamba_chunk_scan_combined


def _chunked(x: torch.Tensor, dt: torch.Tensor, decay: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
             skip: torch.Tensor) -> torch.Tensor:
    length, size, groups = x.shape[1], min(CHUNK, x.shape[1]), b.shape[2]
    # [B, groups, heads of one, chunks, size, ...]; b and c have an axis of 1 for the heads that share them.
    inputs, steps = (in_chunks(part, size).unflatten(1, (groups, -1)) for part in (wide(x) * dt[..., None], dt * decay))
    b, c = (in_chunks(part, size).unsqueeze(2) for part in (b, c))

    fall = steps.cumsum(-1)  # up to and with each token, from the chunk's beginning
    later = torch.ones(size, size, dtype=torch.bool, device=x.device).triu(1)
    between = (fall[..., :, None] - fall[..., None, :]).masked_fill(later, -torch.inf).exp()
    local = ((c @ b.mT) * between) @ inputs
    since, until = fall.exp()[..., None], (fall[..., -1:] - fall).exp()[..., None]

    state, out = None, []
    for i in range(x.shape[1] // size + bool(x.shape[1] % size)):
        read = local[:, :, :, i]
        out.append(read if state is None else read + (c[:, :, :, i] @ state) * since[:, :, :, i])
        written = b[:, :, :, i].mT @ (inputs[:, :, :, i] * until[:, :, :, i])
        state = written if state is None else state * since[:, :, :, i, -1:] + written
    joined = torch.cat(out, -2)[..., :length, :].permute(0, 3, 1, 2, 4).flatten(2, 3)  # [B, L, heads, P]
    return (joined + wide(x) * skip[:, None]).to(x.dtype)


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, groups: int, eps: float) -> torch.Tensor:
    """x and gate [..., C], weight [C] -> weight y / rms(y) of y = x silu(gate), the mean over each group of channels;
    in fp32 up to the weight."""
    y = (wide(x) * F.silu(wide(gate))).unflatten(-1, (groups, -1))
    normed = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return weight * normed.flatten(-2).to(x.dtype)
