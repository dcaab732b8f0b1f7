"""The gated delta rule, in plain torch.

Yang, Kautz and Hatamizadeh, Gated Delta Networks, arXiv:2412.06464. A head has a state S [dk, dv]; a token first lets
it decay, then replaces what its key finds in it by its value, to the share beta, and reads it with its query:

    S_t = (I - beta_t k_t k_t^T) a_t S_(t-1) + beta_t k_t v_t^T,    o_t = S_t^T q_t,    a_t = exp(g_t)

where a_t is a number, or one for each channel of a key (Kimi Delta Attention, arXiv:2510.26692).

Tokens of one chunk are computed at once (section 3.3, and the WY form of arXiv:2406.06484); chunk follows chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from miles_megatron.recurrent import CHUNK, in_chunks, wide

_BY_CHANNEL = 16
"""CHUNK where channels decay: every pair of tokens then has a number for each channel."""

_EPS = 1e-6
"""Under the root of the norm of queries and keys; transformers' and fla's."""


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float,
               activation: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """x and gate [..., D], weight [D] -> weight x / rms(x) x activation(gate); statistics and gate in fp32."""
    full = x.float()
    normed = (full * torch.rsqrt(full.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return ((weight * normed) * activation(gate.float())).to(x.dtype)


def gated_delta_rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor,
                     beta: torch.Tensor) -> torch.Tensor:
    """Sequences from an empty state; queries and keys are normed here, queries scaled by dk^-0.5.

    Args:
        q, k: [B, L, key heads, dk].
        v: [B, L, heads, dv]; each key head serves heads / key heads of them that follow each other.
        g: [B, L, heads] or [B, L, heads, dk] logarithm of the decay, fp32, at most 0; the kernel knows no channels.
        beta: [B, L, heads].

    Returns:
        [B, L, heads, dv] in v's dtype; computed in fp32.
    """
    fused = _fused()
    if q.is_cuda and fused is not None and g.dim() == 3:
        repeat = v.shape[2] // k.shape[2]
        q, k = (x.repeat_interleave(repeat, 2) for x in (q, k))
        return fused(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]
    return _chunked(q, k, v, g, beta)


@functools.cache
def _fused() -> Callable[..., Any] | None:
    """The kernel of the package flash-linear-attention where that is installed."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError:
        return None
    return chunk_gated_delta_rule


def _chunked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    dtype, length = v.dtype, v.shape[1]
    by_channel = g.dim() == 4
    size = min(_BY_CHANNEL if by_channel else CHUNK, length)
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS) for x in (wide(q), wide(k)))
    # [B, heads, chunks, size, ...]; keys have fewer heads, and an axis of 1 for those that share them.
    q, k, v, g, beta = (in_chunks(x, size) for x in (q * k.shape[-1] ** -0.5, k, v, g, beta))
    shared = v.shape[1] // k.shape[1]
    v, g, beta = (x.unflatten(1, (-1, shared)) for x in (v, g, beta))
    q, k = q.unsqueeze(2), k.unsqueeze(2)

    # [..., size, dk], or 1 in the place of dk: up to and with each token, from the chunk's beginning.
    decay = (g if by_channel else g[..., None]).cumsum(-2)
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)[..., None]
    between = (decay[..., :, None, :] - decay[..., None, :, :]).masked_fill(later, -torch.inf).exp()

    def faded(x: torch.Tensor) -> torch.Tensor:
        """Products of x with every key, of what is left of it by then."""
        if by_channel:
            return (x[..., :, None, :] * between * k[..., None, :, :]).sum(-1)
        return (x @ k.mT) * between[..., 0]

    within = faded(q)
    # What the tokens before it in the chunk wrote changes what a token finds: a unit lower triangular system.
    system = faded(k) * beta[..., None]
    reads = k * (beta[..., None] * decay.exp())
    solved = torch.linalg.solve_triangular(system, torch.cat([v * beta[..., None], reads], -1), upper=False,
                                           unitriangular=True)
    values, reads = solved.split([v.shape[-1], k.shape[-1]], -1)
    asks = q * decay.exp()
    keys = k * (decay[..., -1:, :] - decay).exp()
    fades = decay[..., -1, :, None].exp()

    state, out = None, []
    for i in range(v.shape[3]):
        new = values[:, :, :, i]
        if state is not None:
            new = new - reads[:, :, :, i] @ state
        local = within[:, :, :, i] @ new
        out.append(local if state is None else local + asks[:, :, :, i] @ state)
        written = keys[:, :, :, i].mT @ new
        state = written if state is None else state * fades[:, :, :, i] + written
    joined = torch.cat(out, -2)[..., :length, :]  # [B, key heads, shared, L, dv]
    return joined.permute(0, 3, 1, 2, 4).flatten(2, 3).to(dtype)
