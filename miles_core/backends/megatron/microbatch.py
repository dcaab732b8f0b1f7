"""One micro-batch: samples packed end to end, and the rows of it that a loss looks at, as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from miles_core.backends.megatron.layers import ROWS
from miles_core.columns import Columns, Packed
from miles_core.types import Sample


@dataclass(slots=True)
class MicroBatch:
    """Packed samples and their trained prediction rows; T packed rows, N of them trained on.

    Args:
        packed: all columns; rows["targets"] is the token that each row predicts.
        index: [N] int64, the trained rows.
        sample: [N] int64, which of `samples` each belongs to.
        samples: the samples, in packed order.
    """

    packed: Packed
    index: torch.Tensor
    sample: torch.Tensor
    samples: Sequence[Sample]

    def row(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """[N, *axes] of a per-token column."""
        tensor = torch.from_numpy(self.packed.rows[name])[self.index]
        return tensor if dtype is None else tensor.to(dtype)

    def rows(self) -> dict[str, torch.Tensor]:
        """Every per-token column on the trained rows."""
        return {name: self.row(name) for name in self.packed.rows}

    def segment_sum(self, values: torch.Tensor) -> torch.Tensor:
        """[N, ...] -> [samples, ...]: sums over the trained rows of each sample."""
        total = values.new_zeros(len(self.samples), *values.shape[1:])
        return total.index_add(0, self.sample, values)

    def scatter(self, name: str, values: torch.Tensor) -> None:
        """Write [N] values back into each sample's response column `name`; rows not trained on hold 0."""
        full = np.zeros(len(self.packed.rows["tokens"]), np.float32)
        full[self.index.numpy()] = values.numpy()
        for i, sample in enumerate(self.samples):
            start = int(self.packed.cu_seqlens[i]) + sample.length - sample.response_length - 1
            sample.columns[name] = full[start : start + sample.response_length].copy()


def assemble(columns: Columns, samples: Sequence[Sample]) -> MicroBatch:
    """Pack samples and find the rows to train on: response tokens whose mask is set."""
    packed = columns.pack(samples, total_multiple=ROWS)  # whole rows of kernels: the engine's bits (layers.py)
    packed.rows["targets"] = np.roll(packed.rows["tokens"], -1)  # before any split, so that every row knows its target
    index = np.flatnonzero(packed.rows["loss_mask"])
    sample = np.searchsorted(packed.cu_seqlens, index, side="right") - 1
    return MicroBatch(packed, torch.from_numpy(index), torch.from_numpy(sample), samples)
