"""Packed attention that needs neither Transformer Engine nor CUDA, with its rope, windows and softcapping."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from miles_megatron import cpu
from miles_megatron.packed_layout import PackedLayout, Pick, Unpick, packed_layout_of, seen
from miles_megatron.rope import Rope, Rotate
from miles_megatron.specs import Warming

cpu.install()

from megatron.core import parallel_state  # noqa: E402 - after install()
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region  # noqa: E402
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint  # noqa: E402

EXACT_KEYS = 256
"""Longest sequence whose float32 attention on a CPU has the bits of the local engine's; longer ones use SDPA."""
KEY_CHUNK = 128
"""Keys that one product sums over there, as in the engine's (miles_local.products)."""


class PackedAttention(torch.nn.Module):
    """Causal self-attention over packed (thd) or batched (sbhd) rows: the rope, then SDPA bucket by bucket.

    Under context parallelism keys and values are gathered over the group (backward: reduce-scatter).

    Args:
        rope: applied here rather than by Megatron, which would rebuild the tables for q and k of every layer.
        window: keys that a query sees, its own included; None for all.
        softcap: of the scores. They are then written out in full, as no fused kernel of torch's has it.
        sinks: each head of this rank has a number that counts among its scores.
        warming: see specs.Attention.
        k_channels, v_channels: of a head, for those who have to know; here the tensors say it.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, attention_dropout=None,
                 softmax_scale=None, k_channels=None, v_channels=None, cp_comm_type=None, pg_collection=None, *,
                 rope: Rope | None = None, window: int | None = None, softcap: float | None = None,
                 sinks: bool = False, warming: Warming | None = None):  # fmt: skip
        super().__init__()
        self.rope, self.window, self.softcap, self.warming = rope, window, softcap, warming
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.group = getattr(pg_collection, "cp", None) or parallel_state.get_context_parallel_group()
        self.tensor_group = getattr(pg_collection, "tp", None) or parallel_state.get_tensor_model_parallel_group()
        if sinks:
            mine = config.num_attention_heads // self.tensor_group.size()
            self.sinks = torch.nn.Parameter(torch.zeros(mine, dtype=config.params_dtype))
            self.sinks.tensor_model_parallel, self.sinks.partition_dim, self.sinks.partition_stride = True, 0, 1
        else:
            self.sinks = None

    def forward(self, query, key, value, attention_mask=None, attn_mask_type=None, attention_bias=None,
                packed_seq_params=None, index=None):  # fmt: skip
        """q [T, n, d], k [T, g, d], v [T, g, e] -> [T, n*e]; without packed_seq_params q [s, b, n, d] -> [s, b, n*e].

        Raises:
            ValueError: a mask, or context parallelism without packing: only causal packed rows are meant.
        """
        if packed_seq_params is None:
            return self._batched(query, key, value, attention_mask)
        layout = packed_layout_of(packed_seq_params, query, self.group)
        query, key = self._placed(query, key, layout)
        if self.group.size() > 1:
            key, value = (gather_from_sequence_parallel_region(x.contiguous(), True, self.group) for x in (key, value))
        if layout.query_rows is not None:
            query = Pick.apply(query, layout.query_rows, layout.query_back)
        if layout.key_rows is not None:
            key, value = (Pick.apply(x, layout.key_rows, layout.key_back) for x in (key, value))
        out, q, k = [], 0, 0
        for bucket in layout.buckets:
            end_q, end_k = q + bucket.sequences * bucket.queries, k + bucket.sequences * bucket.keys
            parts = (
                x[begin:end].unflatten(0, (bucket.sequences, -1)).transpose(1, 2)
                for x, begin, end in ((query, q, end_q), (key, k, end_k), (value, k, end_k))
            )
            mask = self._mask(bucket, slice(q, end_q), slice(k, end_k), index)
            out.append(self._attend(*parts, mask).transpose(1, 2).reshape(end_q - q, -1))
            q, k = end_q, end_k
        joined = out[0] if len(out) == 1 else torch.cat(out)
        return joined if layout.query_rows is None else Unpick.apply(joined, layout.query_back)

    def _placed(self, query: torch.Tensor, key: torch.Tensor, layout: PackedLayout) -> tuple[torch.Tensor, ...]:
        """Queries and keys of this rank's rows with what their positions make of them."""
        if self.rope is not None:
            tables = layout.tables(self.rope, query.dtype)
            query, key = (Rotate.apply(x, *tables, self.rope.interleaved) for x in (query, key))
        return self._warmed(query, layout.positions[:, None, None]), key

    def _warmed(self, query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if self.warming is None:
            return query
        steps = torch.floor((positions + self.warming.first) / self.warming.step)
        return (query * (torch.log1p(steps) * self.warming.slope + 1)).to(query.dtype)

    def _mask(self, bucket, queries, keys, index):
        """[queries, keys], or [B, 1, queries, keys], True where one sees the other; None where causality says it.

        Args:
            queries, keys: rows of the bucket, of what a subclass has picked in the layout's order.
            index: what it has picked.
        """
        return bucket.mask(self.window)

    def _attend(self, query, key, value, mask=None):
        """[B, n, q, d], [B, g, k, d], [B, g, k, e] -> [B, n, q, e]; causal where no mask is given."""
        dropout = self.dropout if self.training else 0.0
        if self.sinks is not None:
            query, key, value, mask = _with_sink(query, key, value, mask, self.sinks / self.scale)
        exact = query.dtype == torch.float32 and not query.is_cuda and key.shape[2] <= EXACT_KEYS and not dropout
        if self.softcap is not None or (exact and mask is None):
            return written_out(query, key, value, mask, self.scale, self.softcap, dropout)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.scale, dropout_p=dropout,
            enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip

    def _batched(self, query, key, value, attention_mask):
        if attention_mask is not None or self.group.size() > 1:
            raise ValueError("PackedAttention needs packed rows; without packing it supports only a causal batch on "
                             "one rank")
        positions = torch.arange(query.shape[0], device=query.device)
        if self.rope is not None:
            cos, sin = (table[:, None, None] for table in self.rope.tables(positions, query.dtype))
            query, key = (Rotate.apply(x, cos, sin, self.rope.interleaved) for x in (query, key))
        query = self._warmed(query, positions[:, None, None, None])
        plain = self.window is None or self.window >= len(positions)
        mask = None if plain else seen(positions, len(positions), self.window)
        out = self._attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value)), mask)
        return out.permute(2, 0, 1, 3).flatten(2)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Megatron's protocol: heads, and so their sinks, are cut among tensor-parallel ranks."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"sinks": 0}, sharded_offsets,
            tp_group=self.tensor_group, dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )  # fmt: skip


def written_out(query, key, value, mask, scale, softcap, dropout):
    """[B, n, q, d], [B, g, k, d], [B, g, k, e] -> [B, n, q, e] in the engine's order of operations
    (miles_local/decode.py), and so with the same bits; causal where no mask is given."""
    count, heads, queries = query.shape[:3]
    groups, keys = key.shape[1:3]
    hidden = query.new_full((queries, keys) if mask is None else mask.shape, -torch.inf)
    hidden = hidden.triu_(1) if mask is None else hidden.masked_fill_(mask, 0)
    query, key, value = (x.reshape(count * groups, -1, x.shape[-1]) for x in (query, key, value))
    scores = torch.bmm(query, key.transpose(1, 2)).mul_(scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.view(count, heads, queries, keys).add_(hidden)
    shares = torch.softmax(scores, -1, dtype=torch.promote_types(query.dtype, torch.float32)).to(query.dtype)
    shares = F.dropout(shares, dropout) if dropout else shares
    shares = shares.view(count * groups, -1, keys)
    out = torch.bmm(shares[:, :, :KEY_CHUNK], value[:, :KEY_CHUNK])
    for start in range(KEY_CHUNK, keys, KEY_CHUNK):
        part = slice(start, start + KEY_CHUNK)
        out = out + torch.bmm(shares[:, :, part], value[:, part])
    return out.view(count, heads, queries, -1)


_PAD = 8
"""Channels that queries and keys get for a sink: kernels want a multiple of so many."""


def _with_sink(query, key, value, mask, sinks):
    """The same attention with one more key, that every query sees, whose product with a query is its head's sink.

    Its value is zero, so that no kernel has to know of sinks: they are in a channel that only this key reads.
    """
    if mask is None:
        mask = seen(torch.arange(query.shape[2], device=query.device), key.shape[2], None)
    channels = query.shape[-1]
    more = sinks.to(query.dtype)[None, :, None, None].expand(*query.shape[:3], 1)
    query = torch.cat([query, F.pad(more, (0, _PAD - 1))], -1)
    last = key.new_zeros(*key.shape[:2], 1, channels + _PAD)
    last[..., channels] = 1
    key = torch.cat([F.pad(key, (0, _PAD)), last], 2)
    return query, key, F.pad(value, (0, 0, 0, 1)), F.pad(mask, (0, 1), value=True)
