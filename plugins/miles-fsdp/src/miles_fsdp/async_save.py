"""What a checkpoint that is written beside training is copied to (--async-save)."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, cast

import torch
from miles_local.saving import SaveThread
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

ONCE = torch.__version__ < "2.13"
"""Older stagers forget after a copy how to copy what is no tensor: the next one is a KeyError."""


class AsyncSave(SaveThread):
    """Copies by torch's own stager, into memory that each save writes over, pinned where there is a GPU.

    Before torch 2.13 each save finds and pins memory anew.
    """

    def __init__(self, limit: float):
        super().__init__(limit)
        self._stager: DefaultStager | None = None

    def staged(self, tensors: dict[str, Any]) -> Future[dict[str, Any]]:
        """Copies of a state dict. Until `settle` nothing may change its tensors."""
        if self._stager is not None and ONCE:
            self._stager.close()
            self._stager = None
        if self._stager is None:
            cuda = torch.cuda.is_available()
            self._stager = DefaultStager(StagingOptions(use_pinned_memory=cuda, use_shared_memory=False,
                                                        use_async_staging=True, use_non_blocking_copy=cuda))
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the stager's stream waits for no other
        self.copied.clear()
        copies = cast("Future[dict[str, Any]]", self._stager.stage(tensors))
        copies.add_done_callback(lambda _: self.copied.set())
        return copies

    def close(self) -> None:
        super().close()
        if self._stager is not None and self.copied.is_set():
            self._stager.close()
