"""One micro-batch: samples packed end to end, this rank's share of the rows, and the trained ones among them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from miles_local.transfer import on_device

from miles_core.columns import Columns, Packed, split
from miles_core.types import Sample, Status
from miles_megatron.packed_layout import ROWS


@dataclass(slots=True)
class MicroBatch:
    """Packed samples and their trained prediction rows; T rows on this rank, N of them trained on.

    Args:
        packed: this rank's rows of all columns; rows["targets"] is the token that each row predicts, rows["padding"]
            whether it is none of a sample's, or a filler's (miles_local/objective.py).
        boundaries: [n+1] where each sample's rows begin, counted over all context-parallel ranks.
        index: [N] int64, the trained rows.
        sample: [N] int64, which of `samples` each belongs to.
        offset: [N] int64, which token of its response each predicts.
        samples: the samples, in packed order; the same on every context-parallel rank.
        places: [T] where each of this rank's rows lies among those of all context-parallel ranks.
        group: the context-parallel group, None for one rank.
    """

    packed: Packed
    boundaries: np.ndarray
    index: torch.Tensor
    sample: torch.Tensor
    offset: torch.Tensor
    samples: Sequence[Sample]
    places: np.ndarray
    group: dist.ProcessGroup | None = None

    def row(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """[N, *axes] of a per-token column, where the model computes."""
        tensor = on_device(self.packed.rows[name], self.index.device)[self.index]
        return tensor if dtype is None else tensor.to(dtype)

    def rows(self) -> dict[str, torch.Tensor]:
        """Every per-token column on the trained rows."""
        return {name: self.row(name) for name in self.packed.rows}

    def segment_sum(self, values: torch.Tensor) -> torch.Tensor:
        """[N, ...] -> [samples, ...]: sums over the trained rows of each sample, on all context-parallel ranks."""
        total = values.new_zeros(len(self.samples), *values.shape[1:]).index_add(0, self.sample, values)
        return total if self.group is None else _Sum.apply(total, self.group)


class _Sum(torch.autograd.Function):
    """Sum over ranks. Every rank's loss depends on the sum, so its gradient is the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx, values, group):
        ctx.group = group
        values = values.clone()
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def assemble(columns: Columns, samples: Sequence[Sample], *, group: dist.ProcessGroup | None = None,
             sequence_parallel: int = 1, device: torch.device | None = None) -> MicroBatch:
    """Pack samples and find the rows to train on: response tokens whose mask is set.

    Args:
        group: context-parallel ranks, among which each sample's rows are cut.
        sequence_parallel: ranks among which a rank's rows are cut again inside the model.
        device: where the model computes; the CPU by default.
    """
    size, rank = (1, 0) if group is None else (group.size(), group.rank())
    # Whole rows of kernels: the engine's bits (packed_layout.py).
    total = math.lcm(ROWS, sequence_parallel) * size
    packed = columns.pack(samples, multiple=2 * size if size > 1 else 1, total_multiple=total)
    boundaries = packed.cu_seqlens
    # Before any split, so that every row knows its target and its place.
    packed.rows["targets"] = np.roll(packed.rows["tokens"], -1)
    places = np.arange(len(packed.rows["tokens"]))
    ends = [0 if s.status is Status.ABORTED else s.length for s in samples]
    owner = np.searchsorted(boundaries, places, side="right") - 1
    packed.rows["padding"] = places - boundaries[owner] >= np.array([*ends, 0])[owner]
    if size > 1:
        packed.rows["places"] = places
        packed = split(packed, rank, size)
        places = packed.rows.pop("places")
    index = np.flatnonzero(packed.rows["loss_mask"])
    place = places[index]
    sample = np.searchsorted(boundaries, place, side="right") - 1
    first = boundaries[:-1] + np.array([s.length - s.response_length - 1 for s in samples], np.int64)
    index, sample, offset = (on_device(np.asarray(x, np.int64), device or torch.device("cpu"))
                             for x in (index, sample, place - first[sample]))
    return MicroBatch(packed, boundaries, index, sample, offset, samples, places, group if size > 1 else None)
