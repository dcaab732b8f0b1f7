"""The checkpoint that is written beside training (--async-save): one at a time, by a thread of each rank."""

from __future__ import annotations

import datetime
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from miles_core.errors import CheckpointError, WaitError
from miles_local import rendezvous

logger = logging.getLogger(__name__)


class SaveThread:
    """Waits for, starts and gives up checkpoints; with none under way there is nothing to wait for. Whoever copies what
    is trained sets `copied`.

    Args:
        limit: seconds that a checkpoint may take from its plan to its publication.
    """

    GRACE = 3.0
    """Seconds that the end of a trainer leaves a checkpoint under way."""

    def __init__(self, limit: float):
        self.limit, self.publishing, self.copied = limit, threading.Lock(), threading.Event()
        self.group: dist.ProcessGroup | None = None
        self.closed = False
        self._thread: threading.Thread | None = None
        self._target, self._begun = "", 0.0
        self._error: BaseException | None = None
        self.copied.set()

    def start(self, target: Path, publish: Callable[[Any], None]) -> None:
        """Let `publish(self)` write and publish the checkpoint `target`; returns at once."""
        if self.group is None and dist.get_world_size() > 1:  # two threads must not share one
            self.group = dist.new_group(backend=rendezvous.host_backend(),
                                        timeout=datetime.timedelta(seconds=self.limit))
        self._target, self._begun = str(target), time.monotonic()
        self._thread = threading.Thread(target=self._write, args=(publish,), name="checkpoint", daemon=True)
        self._thread.start()

    def _write(self, publish: Callable[[Any], None]) -> None:
        try:
            publish(self)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the next call of the trainer raises it
            self._error = error
        else:
            logger.info("Published %s, written beside training in %.1f s", self._target,
                        time.monotonic() - self._begun)
        finally:
            self.copied.set()

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

    def settle(self) -> None:
        """Until what is trained may change: sampling goes on while it is copied. Raises as `check`."""
        self.copied.wait(self._left())
        self.check()

    def wait(self) -> None:
        """Until the checkpoint under way is published; raises as `check`."""
        if self._thread is not None:
            self._thread.join(self._left())
        self.check()

    def going_on(self) -> None:
        """Called before a checkpoint is published, under the lock `publishing`.

        Raises:
            CheckpointError: the run has ended, and another may save there by now.
        """
        if self.closed:
            raise CheckpointError("the run ended before the checkpoint was written", who=self._target,
                                  code="checkpoint-abandoned", fix="resume from the one before")

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
