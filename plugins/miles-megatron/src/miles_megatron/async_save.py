"""What a checkpoint that is written beside training is copied to (--async-save).

No torch.distributed.checkpoint here, which a run imports only once it saves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from miles_local.saving import SaveThread
from miles_local.transfer import host_memory

from miles_megatron import cpu
from miles_megatron.host_memory import host_copy, synchronise

ALIGNED = 64
"""Bytes at whose multiples a copy begins."""


class AsyncSave(SaveThread):
    """Copies tensors into memory that each save writes over, in the thread that then writes them."""

    def __init__(self, limit: float):
        super().__init__(limit)
        self._staging: dict[str, torch.Tensor] = {}
        self._uncopied: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._device: int | None = None

    def staged(self, part: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Where this rank's tensors of a model will be copied to. Until `settle` nothing may change the tensors."""
        begins = [0, *itertools.accumulate(-(-one.nbytes // ALIGNED) * ALIGNED for one in tensors)]
        memory = self._staging.get(part)
        if memory is None or memory.nbytes != begins[-1]:
            memory = self._staging[part] = host_memory(begins[-1], any(one.is_cuda for one in tensors))
        copies = [memory[begin : begin + one.nbytes].view(one.dtype).view(one.shape)
                  for begin, one in zip(begins, tensors, strict=False)]
        self._uncopied += zip(tensors, copies, strict=True)
        return copies

    def start(self, target: Path, publish: Callable[[AsyncSave], None]) -> None:
        """See SaveThread; `publish` calls `copy` first."""
        self.copied.clear()
        self._device = None if cpu.no_cuda() else torch.cuda.current_device()
        super().start(target, publish)

    def copy(self) -> None:
        """Make the copies."""
        if self._device is not None:
            torch.cuda.set_device(self._device)  # a thread begins on the first
        for tensor, into in self._uncopied:
            host_copy(tensor, into)
        synchronise()
        self._uncopied.clear()
        self.copied.set()
