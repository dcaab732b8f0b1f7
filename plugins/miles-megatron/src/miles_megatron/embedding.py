"""What plugins say of a sample's tokens, laid out as a micro-batch is: rows in place of their embeddings (the hook
embedding_rows), other positions (rope_positions), and which of them see later ones (attention_blocks)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from miles_local.transfer import on_device

from miles_core.errors import HookError
from miles_core.types import Sample
from miles_megatron.microbatch import MicroBatch

Rows = Callable[[Sample, torch.nn.Module, Path], dict[int, torch.Tensor]]
"""The bound hook embedding_rows."""
Positions = Callable[[Sample, Path], dict[int, torch.Tensor]]
"""The bound hook rope_positions."""
Blocks = Callable[[Sample, Path], dict[int, int]]
"""The bound hook attention_blocks."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """What replaces embeddings of a micro-batch.

    Args:
        index: [n] int64 on the CPU, which rows, among those of this context-parallel rank.
        rows: [n, H], or wider, where layers take apart what they get.
    """

    index: torch.Tensor
    rows: torch.Tensor

    def __call__(self, embedded: torch.Tensor, first: int) -> torch.Tensor:
        """[t, 1, H] -> the same with other rows, and zeros behind those that stay, where the others are wider.

        Args:
            embedded: the rows from `first` on; others belong to ranks of sequence parallelism.
        """
        mine = ((self.index >= first) & (self.index < first + len(embedded))).nonzero()[:, 0]
        rows = self.rows[mine.to(self.rows.device)].to(embedded)
        embedded = F.pad(embedded, (0, rows.shape[-1] - embedded.shape[-1]))
        return embedded.index_copy(0, (self.index[mine] - first).to(embedded.device), rows[:, None])


def replacement(hook: Rows, batch: MicroBatch, chunk: torch.nn.Module, folder: Path) -> Replacement | None:
    """Ask for every sample; None where nothing is returned.

    Raises:
        HookError: rows beyond a sample's end.
    """
    places: list[np.ndarray] = []
    parts: list[torch.Tensor] = []
    for begin, sample in zip(batch.boundaries[:-1].tolist(), batch.samples, strict=True):
        for position, rows in hook(sample, chunk, folder).items():
            if not 0 <= position <= sample.length - len(rows):
                raise HookError(f"rows for {sample.name} reach beyond its tokens", code="embedding-rows-outside",
                                got=f"{len(rows)} from {position} on, of {sample.length}", who="embedding_rows",
                                fix="return rows by the position of their first token in the sample")
            places.append(np.arange(begin + position, begin + position + len(rows)))
            parts.append(rows)
    if not parts:
        return None
    # Rows of other context-parallel ranks are left to these.
    _, mine, index = np.intersect1d(np.concatenate(places), batch.places, assume_unique=True, return_indices=True)
    rows = torch.cat(parts)
    return Replacement(torch.from_numpy(index), rows[on_device(mine, rows.device)])


def positions(hook: Positions, batch: MicroBatch, folder: Path) -> torch.Tensor | None:
    """[axes, T] int64 of this rank's rows, where the model computes; None where all are places in a sample."""
    stated = [hook(sample, folder) for sample in batch.samples]
    axes = {len(part) for parts in stated for part in parts.values()}
    if not axes:
        return None
    whole = torch.from_numpy(_places(batch)).expand(max(axes), -1).clone()
    for begin, parts in zip(batch.boundaries[:-1].tolist(), stated, strict=True):
        for first, part in parts.items():
            whole[:, begin + first : begin + first + part.shape[1]] = part
    return on_device(whole.numpy()[:, batch.places], batch.index.device)


def last_keys(hook: Blocks, batch: MicroBatch, folder: Path) -> torch.Tensor | None:
    """[T] int64 of this rank's rows, where the model computes: the place in a sample of the last token that each sees;
    None where it is the row's own."""
    stated = [hook(sample, folder) for sample in batch.samples]
    if not any(stated):
        return None
    whole = _places(batch)
    for begin, blocks in zip(batch.boundaries[:-1].tolist(), stated, strict=True):
        for first, count in blocks.items():
            whole[begin + first : begin + first + count] = first + count - 1
    return on_device(whole[batch.places], batch.index.device)


def _places(batch: MicroBatch) -> np.ndarray:
    """Of all context-parallel ranks' rows, in their samples."""
    bounds = batch.boundaries.astype(np.int64)
    rows = np.arange(max(int(batch.places.max()) + 1, int(bounds[-1])))
    places: np.ndarray = rows - bounds[np.searchsorted(bounds, rows, side="right") - 1]
    return places
