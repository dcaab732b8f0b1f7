"""One micro-batch: samples laid end to end, and the rows among them that are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from miles_local.transfer import on_device

from miles_core.columns import Columns, Packed
from miles_core.types import Sample
from miles_fsdp.context import ALONE, Context


class MicroBatch:
    """T rows of packed samples, of which N predict a token that is trained on.

    Args:
        packed: rows of all columns.
        tokens, positions: [T] int64; positions begin at 0 in each sample.
        index: [N] int64, the trained rows.
        on_host: of index and sample, which nobody has to wait for.
        context: the ranks among which its rows are cut; each sample then ends with rows that fill it up.
        counts: trained rows in the stretch of each of them.
        sample: [N] int64, which of `samples` each belongs to.
        mine: those of the trained rows that are in this rank's stretch.
        offset: [N] which token of its response each predicts.
        targets: [N] int64, the tokens that they predict.
    """

    def __init__(self, columns: Columns, samples: Sequence[Sample], device: torch.device, context: Context = ALONE):
        self.samples, self.device, self.context = samples, device, context
        self.packed: Packed = columns.pack(samples, multiple=context.size)
        self.lengths = np.diff(self.packed.cu_seqlens).tolist()
        begin = self.packed.cu_seqlens[:-1].astype(np.int64)
        tokens = self.packed.rows["tokens"].astype(np.int64)
        index = np.flatnonzero(self.packed.rows["loss_mask"])
        sample = np.searchsorted(begin, index, side="right") - 1
        first = begin + np.array([s.length - s.response_length - 1 for s in samples], np.int64)
        self.offset = index - first[sample]
        positions = np.concatenate([np.arange(length) for length in self.lengths])
        stretches = [context.stretch(len(tokens), rank) for rank in range(context.size)]
        bounds = np.searchsorted(index, [0, *(one.stop for one in stretches)]).tolist()
        self.counts = np.diff(bounds).tolist()
        self.stretch, self.mine = stretches[context.index], slice(*bounds[context.index : context.index + 2])
        self.on_host = {"index": index, "sample": sample}
        self.tokens, self.positions, self.index, self.sample, self.targets = (
            on_device(array, device) for array in (tokens, positions, index, sample, tokens[index + 1]))

    def own(self) -> Packed:
        """The columns of this rank's stretch of rows."""
        if self.context.size == 1:
            return self.packed
        rows = {name: values[self.stretch] for name, values in self.packed.rows.items()}
        return replace(self.packed, rows=rows)

    def rows(self) -> dict[str, torch.Tensor]:
        """[N, *axes] of every per-token column."""
        index = self.on_host["index"]
        return {name: on_device(values[index], self.device) for name, values in self.packed.rows.items()}

    def segment_sum(self, values: torch.Tensor) -> torch.Tensor:
        """[N, ...] -> [samples, ...]: sums over the trained rows of each sample."""
        return values.new_zeros(len(self.samples), *values.shape[1:]).index_add(0, self.sample, values)

    def padded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [samples, longest], each sample's followed by zeros, and [samples, longest] bool: where they are."""
        wide = torch.nn.utils.rnn.pad_sequence(list(self.tokens.split(self.lengths)), batch_first=True)
        lengths = on_device(np.array(self.lengths), self.device)
        return wide, torch.arange(wide.shape[1], device=self.device) < lengths[:, None]
