"""torch's cache of device memory, in a trainer that shares its device with an engine.

Between two rollouts' training the cache is given back, for the engine wakes up on the same device. Left alone, the next
step would take its memory again tensor by tensor, each by a cudaMalloc, while the device waits.
"""

from __future__ import annotations

import torch

from miles_core.config.tables import RunConfig

BLOCK = 2 * 2**30
"""Bytes taken at a time: few calls, and a tensor that outlives its step keeps no more than this from the engine."""
SPARE = 1.25
"""What has to be free, of what is taken: tensors do not fill blocks to their ends, and others want some, too."""


class DeviceCache:
    """Takes what a batch's training needed the last time in a few blocks; does nothing where no engine wakes up."""

    def __init__(self, config: RunConfig):
        self.shared = config.perf.colocate and config.perf.offload_rollout and torch.cuda.is_available()
        self._needed = 0
        self._unused: int | None = None

    def fill(self) -> None:
        """Before the first pass over a batch: what the last batch had in the end, if so much is free."""
        missing = self._needed - torch.cuda.memory_reserved() if self._needed else 0
        if missing <= 0 or torch.cuda.mem_get_info()[0] < SPARE * missing:
            return
        blocks = [torch.empty(min(BLOCK, missing - first), dtype=torch.uint8, device="cuda")
                  for first in range(0, missing, BLOCK)]
        del blocks  # into the cache

    def give_back(self) -> None:
        """After a batch's last step: all that is not in use.

        A tensor that outlives its batch keeps the block that it lies in. Once such tensors keep more than one block
        from the engine, there are no further ones.
        """
        if not self.shared:
            return
        reserved = torch.cuda.memory_reserved()
        torch.cuda.empty_cache()
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        if self._unused is None:
            self._unused = unused  # of a batch whose memory came tensor by tensor
        self._needed = reserved if unused <= self._unused + BLOCK else 0
