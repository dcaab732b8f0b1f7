"""Keys, values and states of the rows that decode together, and what a prefill leaves for them."""

from __future__ import annotations

import math
import mmap
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from miles_local.products import ROWS

WIDTH = 64
"""Columns of a cache come in multiples of this; a GPU's kernels for attention want masks whose rows are aligned."""
CPU = torch.device("cpu")


def round_up(count: int, multiple: int = ROWS) -> int:
    """The next multiple, at least one."""
    return max(1, -(-count // multiple)) * multiple


class Cache:
    """Keys and values of the rows that decode together: per layer two tensors [rows, kv_heads, width, head_dim].

    Shapes and dtype are those of the first prefill that is put in. Zero where nothing was written, left-aligned:
    position p of a row lies in column p. It grows as needed, to at most `max_rows`. Layers whose past is a state have
    that in `states` [rows, ...] (recurrent.py).

    On a CPU its memory is mapped, not taken from the allocator: pages that are never written cost nothing, and what is
    let go is the system's again at once, rather than lost to the trainer in another thread's heap.

    Args:
        max_rows: most rows.
        device: where it lies.
    """

    def __init__(self, max_rows: int, device: torch.device = CPU):
        self._max_rows, self.device = round_up(max_rows), device
        self.layout = 0  # changes whenever the tensors do: addresses of another layout are worth nothing
        self.clear()

    def clear(self) -> None:
        """Free the memory."""
        self.rows = self.width = 0
        self.layout += 1
        self.k: list[torch.Tensor] = []
        self.v: list[torch.Tensor] = []
        self.states: dict[Hashable, torch.Tensor] = {}

    @property
    def token_bytes(self) -> int:
        """Of one position of one row."""
        return sum(one.shape[1] * one.shape[3] * one.element_size() for one in (*self.k, *self.v))

    def reserve(self, rows: int, width: int, exact: bool = False) -> None:
        """Hold at least `rows` rows of `width` positions; with `exact`, no rows ahead of need."""
        if rows <= self.rows and width <= self.width:
            return
        old_rows, old_width = self.rows, self.width
        self.layout += 1
        if rows > old_rows:
            self.rows = round_up(rows if exact else max(rows, min(2 * old_rows, self._max_rows)))
        self.width = max(old_width, round_up(width, WIDTH))
        for tensors in (self.k, self.v):
            for index, old in enumerate(tensors):
                tensors[index] = self._zeros(old)
                tensors[index][:old_rows, :, :old_width] = old
        for key, old in self.states.items():
            self.states[key] = _zeros((self.rows, *old.shape[1:]), old.dtype, self.device)
            self.states[key][:old_rows] = old

    def copy(self, source: torch.Tensor, target: torch.Tensor, width: int | None = None) -> None:
        """Copy rows `source` over rows `target` (both [n] int64), their first `width` positions."""
        source, target = source.to(self.device), target.to(self.device)
        for tensor in (*self.k, *self.v):
            tensor[target, :, :width] = tensor[source, :, :width]
        for tensor in self.states.values():
            tensor[target] = tensor[source]

    def put(self, rows: torch.Tensor, picks: torch.Tensor, filled: Prefill) -> None:
        """Fill rows [n] with the sequences `picks` [n] of a prefill."""
        rows, picks = rows.to(self.device), picks.to(self.device)
        if not self.k and not self.states:
            self.k, self.v = ([self._zeros(like) for like in side] for side in (filled.k, filled.v))
            self.states = {key: _zeros((self.rows, *like.shape[1:]), like.dtype, self.device)
                           for key, like in filled.states.items()}
        for mine, theirs in ((self.k, filled.k), (self.v, filled.v)):
            for tensor, new in zip(mine, theirs, strict=True):
                width = min(new.shape[2], self.width)
                tensor[rows, :, :width] = new[picks][:, :, :width]
        for key, tensor in self.states.items():
            tensor[rows] = filled.states[key][picks]

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        """[rows, kv_heads, width, head_dim]."""
        return _zeros((self.rows, like.shape[1], self.width, like.shape[3]), like.dtype, self.device)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU in pages of their own."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = math.prod(shape)
    return torch.frombuffer(mmap.mmap(-1, dtype.itemsize * count), dtype=dtype, count=count).view(shape)


@dataclass(slots=True)
class Prefill:
    """What a prefill of U sequences, padded to W positions, computed.

    Args:
        logits: [U, V] float32 after each sequence's last token.
        k, v: per layer [U, kv_heads, W, head_dim]; columns beyond a sequence's length hold nothing of use.
        states: [U, ...] after each sequence's last token, of layers whose past is a state.
        routing: [U, W, layers, topk] int16 where asked for.
    """

    logits: torch.Tensor
    k: list[torch.Tensor] = field(default_factory=list)
    v: list[torch.Tensor] = field(default_factory=list)
    states: dict[Hashable, torch.Tensor] = field(default_factory=dict)
    routing: torch.Tensor | None = None
