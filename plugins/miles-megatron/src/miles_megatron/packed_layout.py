"""How packed sequences of unequal length become few attention calls and come back.

Sequences of about the same length are padded into one bucket. Padding lies to the right, where causality hides it, and
a sequence's bucket depends on its own length only, so neither padding nor packing changes a result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from miles_megatron import cpu

cpu.install()

from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402 - after install()

if TYPE_CHECKING:
    from miles_megatron.rope import Rope

ROWS = 16
"""Row counts of matrix products are multiples of this: smaller ones take other kernels, with other bits."""


class Pick(torch.autograd.Function):
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


class Unpick(torch.autograd.Function):
    """x [P, ...] -> x[back], one row for each of the original ones; rows of padding get no gradient."""

    @staticmethod
    def forward(ctx, x, back):
        ctx.save_for_backward(back)
        ctx.rows = x.shape[0]
        return x.index_select(0, back)

    @staticmethod
    def backward(ctx, grad):
        return grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy_(0, *ctx.saved_tensors, grad), None


def seen(positions: torch.Tensor, keys: int, window: int | None, last: torch.Tensor | None = None) -> torch.Tensor:
    """[queries, keys] True for the keys up to each query's position, and of those the last `window` only.

    Args:
        last: [B, queries] of the last key that each query of a sequence sees; then the result is [B, 1, queries, keys].
    """
    places = torch.arange(keys, device=positions.device)
    before = places <= (positions if last is None else last[:, None])[..., None]
    return before if window is None else before & (positions[:, None] - places < window)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences that share one SDPA call.

    Args:
        sequences: how many.
        positions: [queries] of the padded query rows of each on this rank; they count up from 0 where `whole`.
        keys: padded rows of each in all.
        whole: this rank holds all query rows.
        last: [sequences, queries] of the last key that each query sees; None where it is the query's own.
    """

    sequences: int
    positions: torch.Tensor
    keys: int
    whole: bool
    last: torch.Tensor | None = None
    _masks: dict[int | None, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def queries(self) -> int:
        """Padded query rows of each sequence on this rank."""
        return len(self.positions)

    def mask(self, window: int | None = None) -> torch.Tensor | None:
        """[queries, keys], or [sequences, 1, queries, keys], True where a query sees a key; None where plain causality
        says it. Made once per window."""
        window = None if window is None or window >= self.keys else window
        if self.whole and window is None and self.last is None:
            return None
        if window not in self._masks:
            self._masks[window] = seen(self.positions, self.keys, window, self.last)
        return self._masks[window]


@dataclass(slots=True)
class PackedLayout:
    """How packed rows become buckets and come back; made once per micro-batch and used by every layer.

    Args:
        positions: [T] position of each of this rank's rows in its sequence.
        buckets: in the order of their rows after picking.
        query_rows, query_back: [sum sequences x queries], [T]; None when the rows already lie as the buckets want.
        key_rows, key_back: the same for keys and values, whose rows are counted over all context-parallel ranks.
        turning: [axes, T] positions of the rope, where they are others.
    """

    positions: torch.Tensor
    buckets: list[Bucket]
    query_rows: torch.Tensor | None
    query_back: torch.Tensor | None
    key_rows: torch.Tensor | None
    key_back: torch.Tensor | None
    turning: torch.Tensor | None = None
    _tables: dict[tuple[Rope, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def tables(self, rope: Rope, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, 1, r/2] of this rank's rows; the layers that share a rope share them."""
        if (rope, dtype) not in self._tables:
            cos, sin = rope.tables(self.positions if self.turning is None else self.turning, dtype)
            self._tables[rope, dtype] = cos[:, None], sin[:, None]
        return self._tables[rope, dtype]

    def look_ahead(self, last: torch.Tensor) -> None:
        """Tell buckets in which a query sees later keys than its own the last one, [T] of this rank's rows."""
        rows = last if self.query_rows is None else last[self.query_rows]
        parts = rows.split([bucket.sequences * bucket.queries for bucket in self.buckets])
        for number, (bucket, part) in enumerate(zip(self.buckets, parts, strict=True)):
            # A row of padding sees itself, however far it is from the row that it repeats.
            reach = part.view(bucket.sequences, -1).maximum(bucket.positions)
            if not torch.equal(reach, bucket.positions.expand_as(reach)):
                self.buckets[number] = replace(bucket, last=reach, _masks={})

    def to(self, device: torch.device) -> PackedLayout:
        """Layouts are made on the CPU; there this copies nothing."""
        tensors = (self.query_rows, self.query_back, self.key_rows, self.key_back)
        buckets = [replace(b, positions=b.positions.to(device)) for b in self.buckets]
        return PackedLayout(self.positions.to(device), buckets, *(t if t is None else t.to(device) for t in tensors))


@dataclass
class PackedRows(PackedSeqParams):
    """Megatron's PackedSeqParams that remembers what the layers made of it.

    Args:
        positions: [axes, T] int64 by which the rope turns this rank's rows; None where they are places in a sequence.
        tokens: [1, T] of this rank's rows, for layers that ask for them; the model sets them.
        last: [T] int64 of this rank's rows, the place in its sequence of the last key that each sees; None where it is
            the row's own.
        replaced: embeddings [t, 1, H] of this rank's rows, and the number of the first -> with others in place of some.
        padding: [T] bool of this rank's rows, those that routers learn nothing from; the model makes it what they take.
    """

    positions: torch.Tensor | None = field(default=None, repr=False, compare=False)
    last: torch.Tensor | None = field(default=None, repr=False, compare=False)
    tokens: torch.Tensor | None = field(default=None, repr=False, compare=False)
    replaced: Callable[[torch.Tensor, int], torch.Tensor] | None = field(default=None, repr=False, compare=False)
    padding: torch.Tensor | None = field(default=None, repr=False, compare=False)
    layout: PackedLayout | None = field(default=None, repr=False, compare=False)
    _on_device: PackedSeqParams | None = field(default=None, repr=False, compare=False)
    _tables: dict[tuple[Rope, torch.dtype], list[torch.Tensor]] = field(default_factory=dict, repr=False, compare=False)

    def tables(self, rope: Rope, dtype: torch.dtype) -> list[torch.Tensor]:
        """cos and sin [T, 1, r/2] of `positions`, for layers that make no layout."""
        if (rope, dtype) not in self._tables:
            self._tables[rope, dtype] = [table[:, None] for table in rope.tables(self.positions, dtype)]
        return self._tables[rope, dtype]

    def on_device(self, device: torch.device, total: int, ranks: int = 1) -> PackedSeqParams:
        """What Transformer Engine's attention takes.

        Rows after the last boundary are one more sequence: what a kernel leaves out would be whatever was in memory,
        and a NaN there poisons the gradient of every weight that the row meets.

        Args:
            total: rows of all context-parallel ranks.
            ranks: how many these are.
        """
        if self._on_device is None:
            cu = self.cu_seqlens_q
            if cu[-1] < total:
                cu = torch.cat([cu, cu.new_tensor([total])])
            longest = int((cu[1:] - cu[:-1]).max())
            cu = cu.to(device, non_blocking=True)
            # One rank has no use for the padded ones, which Transformer Engine would compare: that waits for the GPU.
            padded = cu if ranks > 1 else None
            self._on_device = PackedSeqParams(
                qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, cu_seqlens_q_padded=padded,
                cu_seqlens_kv_padded=padded, max_seqlen_q=longest, max_seqlen_kv=longest,
            )  # fmt: skip
        return self._on_device


def packed_rows(cu_seqlens, replaced: Callable[[torch.Tensor, int], torch.Tensor] | None = None,
                positions: torch.Tensor | None = None, last: torch.Tensor | None = None,
                padding: torch.Tensor | None = None) -> PackedRows:
    """Describe packed sequences to the model.

    Args:
        cu_seqlens: [n+1] integers (list, array or tensor), where each sequence begins, padding included. Under context
            parallelism these are the boundaries before the rows are split among ranks.
        replaced, positions, last, padding: see PackedRows.
    """
    cu = torch.as_tensor(cu_seqlens, dtype=torch.int32)
    longest = int((cu[1:] - cu[:-1]).max()) if len(cu) > 1 else 0
    return PackedRows(
        qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, cu_seqlens_q_padded=cu, cu_seqlens_kv_padded=cu,
        max_seqlen_q=longest, max_seqlen_kv=longest, replaced=replaced, positions=positions,
        last=last, padding=padding,
    )  # fmt: skip


def packed_layout_of(params: PackedSeqParams, rows: torch.Tensor, group: dist.ProcessGroup) -> PackedLayout:
    """The layout of a micro-batch, which the first layer that asks makes and all others share.

    Args:
        rows: [T, ...] of this rank, on the device where the layout is wanted.
        group: the context-parallel ranks.
    """
    layout = getattr(params, "layout", None)
    if layout is None:
        cu = params.cu_seqlens_q_padded if params.cu_seqlens_q_padded is not None else params.cu_seqlens_q
        total = rows.shape[0] * group.size()
        layout = make_packed_layout(cu.tolist(), total, group.rank(), group.size()).to(rows.device)
        if (positions := getattr(params, "positions", None)) is not None:
            layout.turning = positions
        if (last := getattr(params, "last", None)) is not None:
            layout.look_ahead(last)
        params.layout = layout
    return layout


def _padded(length: int) -> int:
    """Bucket of a length: 8 per octave and multiples of ROWS; depends on nothing else."""
    step = max(ROWS, 1 << max(length.bit_length() - 4, 0))
    return -(-length // step) * step


def make_packed_layout(cu_seqlens: list[int], total: int, rank: int = 0, size: int = 1) -> PackedLayout:
    """Sort sequences into buckets.

    Args:
        cu_seqlens: boundaries over all ranks.
        total: rows of all ranks; rows after the last boundary are one more sequence, which is ignored.
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
        buckets.append(Bucket(len(members), mine, padded, size == 1))
    query = _there_and_back(torch.cat(query_rows), total // size)
    keys = _there_and_back(torch.cat(key_rows), total) if size > 1 else query
    return PackedLayout(positions, buckets, *query, *keys)


def _there_and_back(rows: torch.Tensor, total: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """rows [P] to pick and the [total] places at which each row was picked first; None twice for the identity."""
    if len(rows) == total and torch.equal(rows, torch.arange(total)):
        return None, None
    back = torch.empty(total, dtype=torch.int64)
    # Padding repeats the last row of its sequence, so written backwards the first pick stays.
    back[rows.flip(0)] = torch.arange(len(rows) - 1, -1, -1)
    return rows, back
