"""The checkpoint that is written beside training (--async-save): one at a time, by a thread of each rank.

No torch.distributed.checkpoint here, which a run imports only once it saves.
"""

from __future__ import annotations

import datetime
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from miles_local import rendezvous
from miles_local.transfer import host_memory

from miles_core.errors import WaitError
from miles_megatron import cpu
from miles_megatron.host_memory import host_copy, synchronise

logger = logging.getLogger(__name__)

ALIGNED = 64
"""Bytes at whose multiples a copy begins."""


class AsyncSave:
    """Waits for, starts and gives up checkpoints.

    Args:
        limit: seconds that a checkpoint may take from its staging to its publication.
    """

    GRACE = 3.0
    """Seconds that the end of a trainer leaves a checkpoint under way."""

    def __init__(self, limit: float):
        self.limit, self._staging = limit, dict[str, torch.Tensor]()
        self._uncopied: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._copied = threading.Event()
        self._copied.set()
        self._device: int | None = None
        self.publishing = threading.Lock()
        self._thread: threading.Thread | None = None
        self._target, self._begun = "", 0.0
        self._error: BaseException | None = None
        self.group: dist.ProcessGroup | None = None
        self.closed = False

    def staged(self, part: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Where this rank's tensors of a model will be copied to, which is memory that each save writes over.

        Until `settle` nothing may change the tensors.
        """
        begins = [0, *itertools.accumulate(-(-one.nbytes // ALIGNED) * ALIGNED for one in tensors)]
        memory = self._staging.get(part)
        if memory is None or memory.nbytes != begins[-1]:
            memory = self._staging[part] = host_memory(begins[-1], any(one.is_cuda for one in tensors))
        copies = [memory[begin : begin + one.nbytes].view(one.dtype).view(one.shape)
                  for begin, one in zip(begins, tensors, strict=False)]
        self._uncopied += zip(tensors, copies, strict=True)
        return copies

    def copy(self) -> None:
        """Make the copies, in the thread that writes them."""
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)  # a thread begins on the first
            for tensor, into in self._uncopied:
                host_copy(tensor, into)
            synchronise()
        finally:
            self._uncopied.clear()
            self._copied.set()

    def settle(self) -> None:
        """Until the tensors may change: sampling goes on while they are copied. Raises as `check`."""
        self._copied.wait(self._left())
        self.check()

    def start(self, target: Path, publish: Callable[[AsyncSave], None]) -> None:
        """Let `publish` write and publish the checkpoint `target`; returns at once."""
        if self.group is None and dist.get_world_size() > 1:  # two threads must not share one
            self.group = dist.new_group(backend=rendezvous.host_backend(),
                                        timeout=datetime.timedelta(seconds=self.limit))
        self._target, self._begun = str(target), time.monotonic()
        self._copied.clear()
        self._device = None if cpu.no_cuda() else torch.cuda.current_device()
        self._thread = threading.Thread(target=self._write, args=(publish,), name="checkpoint", daemon=True)
        self._thread.start()

    def _write(self, publish: Callable[[AsyncSave], None]) -> None:
        try:
            publish(self)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the next call of the trainer raises it
            self._error = error
        else:
            logger.info("Published %s, written beside training in %.1f s", self._target,
                        time.monotonic() - self._begun)

    def check(self) -> None:
        """
        Raises:
            CheckpointError: the last checkpoint could not be written.
            WaitError: it takes too long.
        """
        if self._error is not None:
            raise self._error
        if self._alive() and self._left() == 0:
            raise WaitError(f"a checkpoint was not written within {self.limit:g} s", code="checkpoint-write-timeout",
                            who=self._target, fix="look at the disk, or raise --trainer-timeout; earlier checkpoints "
                            "are intact")

    def wait(self) -> None:
        """Until the checkpoint under way is published; raises as `check`."""
        if self._thread is not None:
            self._thread.join(self._left())
        self.check()

    def close(self) -> None:
        """What is not published after some seconds never will be: another run may save there."""
        if self._thread is not None:
            self._thread.join(self.GRACE)
        with self.publishing:
            self.closed = True

    def _alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _left(self) -> float:
        return max(0.0, self._begun + self.limit - time.monotonic())
