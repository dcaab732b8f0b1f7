"""Layer-spec parts that need neither Transformer Engine nor CUDA: norm, SwiGLU, and packed attention with its rope.

They are written for few passes over memory, which is what a small model's step costs on a CPU: the elementwise parts
are autograd functions that save their inputs and nothing else, the rope's tables are made once per micro-batch, and
packed sequences of unequal length share SDPA calls.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from miles_core.backends.megatron import cpu

cpu.install()

from megatron.core import parallel_state  # noqa: E402 - after install()
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402

_BLOCK = 512
"""Rows of one block where a function works blockwise."""

ROWS = 16
"""Row counts of matrix products are multiples of this: smaller ones take other kernels, with other bits."""

EXACT_KEYS = 256
"""Longest sequence whose float32 attention on a CPU has the bits of the local engine's; longer ones use SDPA."""


class _RMSNorm(torch.autograd.Function):
    """x [..., H], weight [H] -> x / rms(x) * weight, statistics in fp32 as Hugging Face's Qwen3RMSNorm does."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # The engine's steps, and so its bits (backends/local/decode.py).
        scale = (wide * wide).mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        grad, normed = grad.to(scale.dtype), x * scale
        product = normed * grad
        grad_weight = product.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        along = (product @ weight.to(product.dtype)).div_(x.shape[-1]).unsqueeze(-1)
        # d x = (weight * grad - normed * mean(weight * grad * normed)) / rms
        grad_x = torch.mul(grad, weight).addcmul_(normed, along, value=-1).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None


class RMSNorm(torch.nn.Module):
    """Root mean square norm over the last axis (Zhang and Sennrich, arXiv:1910.07467)."""

    def __init__(self, hidden_size: int, eps: float, dtype: torch.dtype):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=dtype))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _RMSNorm.apply(x, self.weight, self.eps)


class Norm:
    """What a layer spec calls for a norm: RMSNorm or LayerNorm, and usable under sequence parallelism.

    Megatron's own WrappedTorchNorm refuses sequence parallelism; the mark on the parameter is all that
    `finalize_model_grads` needs to sum its gradient over the tensor-parallel group.
    """

    def __new__(cls, config, hidden_size: int, eps: float = 1e-5, **_):
        if config.normalization == "RMSNorm":
            norm = RMSNorm(hidden_size, eps, config.params_dtype)
        else:
            norm = torch.nn.LayerNorm(hidden_size, eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class _SwiGLU(torch.autograd.Function):
    """x [..., 2F] = (gate, up) -> silu(gate) * up, [..., F]."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        out = torch.empty_like(x)
        # In blocks the temporaries stay in cache; whole, each would be fresh memory (measured: half the time).
        for x_, grad_, out_ in zip(x.split(_BLOCK), grad.split(_BLOCK), out.split(_BLOCK), strict=True):
            (gate, up), (to_gate, to_up) = x_.chunk(2, -1), out_.chunk(2, -1)
            torch.mul(grad_, F.silu(gate), out=to_up)
            torch.ops.aten.silu_backward.grad_input(grad_ * up, gate, grad_input=to_gate)
        return out


class SwiGLU(MegatronModule):
    """The activation of a gated MLP in one pass each way (Shazeer, arXiv:2002.05202)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _SwiGLU.apply(x)


class _Rotate(torch.autograd.Function):
    """x [..., d], cos and sin [..., d/2] -> each pair (x[i], x[i + d/2]) turned by its angle; backward turns back."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1)

    @staticmethod
    def backward(ctx, grad):
        return _turn(grad, *ctx.saved_tensors, -1), None, None


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int) -> torch.Tensor:
    # Products rounded before they are added, as the engine does it: addcmul would fuse them.
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    first, second = x.chunk(2, -1)
    to_first, to_second = out.chunk(2, -1)
    torch.mul(first, cos, out=to_first).add_(second * sin, alpha=-sign)
    torch.mul(second, cos, out=to_second).add_(first * sin, alpha=sign)
    return out


class Rope:
    """Rotary position embedding (Su et al., arXiv:2104.09864); all layers of a model share one.

    Args:
        dim: size of a head.
        base: rope_theta.
    """

    def __init__(self, dim: int, base: float):
        self.dim, self.base = dim, base
        self.inverse_frequency = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))

    def tables(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [N] -> cos and sin [N, dim/2]; the angles in fp32."""
        angles = torch.outer(positions.float(), self.inverse_frequency.to(positions.device))
        return angles.cos().to(dtype), angles.sin().to(dtype)


class _Pick(torch.autograd.Function):
    """x [N, ...] -> x[rows]; where a row is picked twice only the pick that `back` names has a gradient.

    A plain index would add gradients row by row; here both directions are one gather.
    """

    @staticmethod
    def forward(ctx, x, rows, back):
        ctx.save_for_backward(back)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx, grad):
        return grad.index_select(0, *ctx.saved_tensors), None, None


class _Unpick(torch.autograd.Function):
    """x [P, ...] -> x[back], one row for each of the original ones; rows of padding get no gradient."""

    @staticmethod
    def forward(ctx, x, back):
        ctx.save_for_backward(back)
        ctx.rows = x.shape[0]
        return x.index_select(0, back)

    @staticmethod
    def backward(ctx, grad):
        return grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy_(0, *ctx.saved_tensors, grad), None


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences that share one SDPA call.

    Args:
        sequences: how many.
        queries, keys: padded rows of each, on this rank and in all.
        mask: [queries, keys] True where a query sees a key; None where plain causality says it.
    """

    sequences: int
    queries: int
    keys: int
    mask: torch.Tensor | None


@dataclass(slots=True)
class Plan:
    """How packed rows become buckets and come back; made once per micro-batch and used by every layer.

    Args:
        positions: [T] position of each of this rank's rows in its sequence.
        buckets: in the order of their rows after picking.
        query_rows, query_back: [sum sequences x queries], [T]; None when the rows already lie as the buckets want.
        key_rows, key_back: the same for keys and values, whose rows are counted over all context-parallel ranks.
    """

    positions: torch.Tensor
    buckets: list[Bucket]
    query_rows: torch.Tensor | None
    query_back: torch.Tensor | None
    key_rows: torch.Tensor | None
    key_back: torch.Tensor | None
    tables: tuple[Rope, torch.dtype, torch.Tensor, torch.Tensor] | None = None

    def to(self, device: torch.device) -> Plan:
        """Plans are made on the CPU; there this copies nothing."""
        tensors = (self.query_rows, self.query_back, self.key_rows, self.key_back)
        buckets = [b if b.mask is None else replace(b, mask=b.mask.to(device)) for b in self.buckets]
        return Plan(self.positions.to(device), buckets, *(t if t is None else t.to(device) for t in tensors))


@dataclass
class PackedRows(PackedSeqParams):
    """Megatron's PackedSeqParams that remembers its plan."""

    plan: Plan | None = field(default=None, repr=False, compare=False)


def packed_rows(cu_seqlens) -> PackedRows:
    """Describe packed sequences to the model.

    Args:
        cu_seqlens: [n+1] integers (list, array or tensor), where each sequence begins, padding included. Under context
            parallelism these are the boundaries before the rows are split among ranks.
    """
    cu = torch.as_tensor(cu_seqlens, dtype=torch.int32)
    longest = int((cu[1:] - cu[:-1]).max()) if len(cu) > 1 else 0
    return PackedRows(
        qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, cu_seqlens_q_padded=cu, cu_seqlens_kv_padded=cu,
        max_seqlen_q=longest, max_seqlen_kv=longest,
    )  # fmt: skip


def _padded(length: int) -> int:
    """Bucket of a length: 8 per octave and multiples of ROWS; depends on nothing else."""
    step = max(ROWS, 1 << max(length.bit_length() - 4, 0))
    return -(-length // step) * step


def make_plan(cu_seqlens: list[int], total: int, rank: int = 0, size: int = 1) -> Plan:
    """Sort sequences into buckets.

    Args:
        cu_seqlens: boundaries over all ranks.
        total: rows of all ranks; rows after the last boundary are one more sequence, which nobody looks at.
        rank, size: of the context-parallel group. With size > 1 a rank holds of each sequence the chunks r and
            2 size - 1 - r of 2 size (Megatron-core's layout), and a bucket holds sequences of one length.
    """
    bounds = sorted({0, *cu_seqlens, total})
    by_length: dict[int, list[tuple[int, int]]] = {}
    for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
        length = stop - start
        by_length.setdefault(_padded(length) if size == 1 else length, []).append((start, length))
    positions = torch.empty(total // size, dtype=torch.int64)
    buckets, query_rows, key_rows = [], [], []
    for padded, members in sorted(by_length.items()):
        zigzag = torch.arange(padded)
        if size > 1:
            chunks = zigzag.view(2 * size, -1)
            zigzag = torch.stack([torch.cat([chunks[r], chunks[2 * size - 1 - r]]) for r in range(size)])
        mine = zigzag[rank] if size > 1 else zigzag
        start = torch.tensor([start for start, _ in members])[:, None]
        length = torch.tensor([length for _, length in members])[:, None]
        local = torch.minimum(torch.arange(len(mine)), length // size - 1) + start // size
        positions[local] = mine.expand(len(members), -1).minimum(length - 1)
        query_rows.append(local.flatten())
        if size > 1:
            # Gathered rows lie rank after rank; the key at position p of a sequence is wherever the zigzag put it.
            where = torch.empty(padded, dtype=torch.int64)
            offsets = torch.arange(size)[:, None] * (total // size) + torch.arange(padded // size)
            where[zigzag.flatten()] = offsets.flatten()
            key_rows.append((start // size + where).flatten())
        mask = None if size == 1 else mine[:, None] >= torch.arange(padded)
        buckets.append(Bucket(len(members), len(mine), padded, mask))
    query = _there_and_back(torch.cat(query_rows), total // size)
    keys = _there_and_back(torch.cat(key_rows), total) if size > 1 else query
    return Plan(positions, buckets, *query, *keys)


def _there_and_back(rows: torch.Tensor, total: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """rows [P] to pick and the [total] places at which each row was picked first; None twice for the identity."""
    if len(rows) == total and torch.equal(rows, torch.arange(total)):
        return None, None
    back = torch.empty(total, dtype=torch.int64)
    # Padding repeats the last row of its sequence, so written backwards the first pick stays.
    back[rows.flip(0)] = torch.arange(len(rows) - 1, -1, -1)
    return rows, back


class PackedAttention(torch.nn.Module):
    """Causal self-attention over packed (thd) or batched (sbhd) rows: the rope, then SDPA.

    Sequences of about the same length are padded into one SDPA call. Padding lies to the right, where causality hides
    it, and a sequence's bucket depends on its own length only, so neither padding nor packing changes a result.

    Under context parallelism keys and values are gathered over the group (backward: reduce-scatter).

    Args:
        rope: applied here rather than by Megatron, which would rebuild the tables for q and k of every layer.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, attention_dropout=None,
                 softmax_scale=None, cp_comm_type=None, pg_collection=None, *, rope: Rope | None = None):  # fmt: skip
        super().__init__()
        self.rope = rope
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.group = getattr(pg_collection, "cp", None) or parallel_state.get_context_parallel_group()

    def forward(self, query, key, value, attention_mask=None, attn_mask_type=None, attention_bias=None,
                packed_seq_params=None):  # fmt: skip
        """q [T, n, d], k and v [T, g, d] -> [T, n*d]; without packed_seq_params q [s, b, n, d] -> [s, b, n*d].

        Raises:
            ValueError: a mask, or context parallelism without packing: only causal packed rows are meant.
        """
        if packed_seq_params is None:
            return self._batched(query, key, value, attention_mask)
        plan = self._plan(packed_seq_params, query)
        if self.rope is not None:
            query, key = (_Rotate.apply(x, *self._tables(plan, x.dtype)) for x in (query, key))
        if self.group.size() > 1:
            key, value = (gather_from_sequence_parallel_region(x.contiguous(), True, self.group) for x in (key, value))
        if plan.query_rows is not None:
            query = _Pick.apply(query, plan.query_rows, plan.query_back)
        if plan.key_rows is not None:
            key, value = (_Pick.apply(x, plan.key_rows, plan.key_back) for x in (key, value))
        out, q, k = [], 0, 0
        for bucket in plan.buckets:
            end_q, end_k = q + bucket.sequences * bucket.queries, k + bucket.sequences * bucket.keys
            parts = (
                x[begin:end].unflatten(0, (bucket.sequences, -1)).transpose(1, 2)
                for x, begin, end in ((query, q, end_q), (key, k, end_k), (value, k, end_k))
            )
            out.append(self._attend(*parts, bucket.mask).transpose(1, 2).reshape(end_q - q, -1))
            q, k = end_q, end_k
        joined = out[0] if len(out) == 1 else torch.cat(out)
        return joined if plan.query_rows is None else _Unpick.apply(joined, plan.query_back)

    def _attend(self, query, key, value, mask=None):
        """[B, n, q, d], [B, g, k, d] twice -> [B, n, q, d]; causal where no mask is given."""
        exact = mask is None and query.dtype == torch.float32 and not query.is_cuda and key.shape[2] <= EXACT_KEYS
        if exact and not (self.dropout and self.training):
            return self._exact(query, key, value)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.scale,
            dropout_p=self.dropout if self.training else 0.0, enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip

    def _exact(self, query, key, value):
        """The same in the engine's order of operations (backends/local/decode.py), and so with the same bits."""
        count, heads, queries, dim = query.shape
        groups, keys = key.shape[1:3]
        causal = torch.full((queries, keys), -torch.inf).triu_(1)
        query, key, value = (x.reshape(count * groups, -1, dim) for x in (query, key, value))
        scores = torch.bmm(query, key.transpose(1, 2)).mul_(self.scale).view(count * heads, queries, keys).add_(causal)
        shares = torch.softmax(scores, -1).view(count * groups, -1, keys)
        return torch.bmm(shares, value).view(count, heads, queries, dim)

    def _batched(self, query, key, value, attention_mask):
        if attention_mask is not None or self.group.size() > 1:
            raise ValueError("PackedAttention takes packed rows; without packing only a causal batch on one rank")
        if self.rope is not None:
            cos, sin = self.rope.tables(torch.arange(query.shape[0], device=query.device), query.dtype)
            query, key = (_Rotate.apply(x, cos[:, None, None], sin[:, None, None]) for x in (query, key))
        out = self._attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value)))
        return out.permute(2, 0, 1, 3).flatten(2)

    def _plan(self, params: PackedSeqParams, query: torch.Tensor) -> Plan:
        plan = getattr(params, "plan", None)
        if plan is None:
            cu = params.cu_seqlens_q_padded if params.cu_seqlens_q_padded is not None else params.cu_seqlens_q
            size = self.group.size()
            plan = make_plan(cu.tolist(), query.shape[0] * size, self.group.rank(), size).to(query.device)
            params.plan = plan
        return plan

    def _tables(self, plan: Plan, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, 1, d/2] of the plan's rows; all layers share one rope, so they are made once."""
        if plan.tables is None or plan.tables[0] is not self.rope or plan.tables[1] is not dtype:
            cos, sin = self.rope.tables(plan.positions, dtype)
            plan.tables = (self.rope, dtype, cos[:, None], sin[:, None])
        return plan.tables[2:]
