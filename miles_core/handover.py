"""Hand-over: a trainer and engines that share GPUs take turns at the memory.

What each side holds during a purpose is one row of TABLE. Between two rows whoever holds too much gives it back first,
and only then does the other take: memory never has to hold more than the larger row. From that follows Miles's order,
for instance from training to a rollout: trainer.offload(gradients, optimizer), engine.occupy(weights), the sync,
trainer.offload(weights), engine.occupy(kv_cache, cuda_graph).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from miles_core.errors import SyncError, WaitError
from miles_core.hosts import Handle
from miles_core.waits import within

if TYPE_CHECKING:
    from miles_core.stages.rollout import Engine

TRAINER = ("weights", "gradients", "optimizer")
ENGINE = ("kv_cache", "weights", "cuda_graph")

TABLE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # purpose    the trainer holds   the engine holds
    "start":   ((),                  ENGINE),
    "rollout": ((),                  ENGINE),
    "train":   (TRAINER,             ()),
    "sync":    (("weights",),        ("weights",)),
    "save":    (TRAINER,             ("weights",)),  # released weights come back empty, so they stay
}  # fmt: skip

GRACE = 30.0
"""Seconds that a cancelled hand-over may take to come to an end: half of one leaves nobody knowing who holds what."""


class HandOver:
    """Moves the memory of both sides to where a purpose needs it.

    Args:
        offload_train, offload_rollout: False keeps that side's memory where it is.
        timeout: seconds that one call of the engine may take; the trainer's handle has its own.
    """

    def __init__(self, trainer: Handle, engine: Engine, *, offload_train: bool = True, offload_rollout: bool = True,
                 timeout: float = 600.0):
        self._calls = {"offload": trainer.offload, "onload": trainer.onload,
                       "release": engine.release, "occupy": engine.occupy}
        self._moves = {"trainer": offload_train, "engine": offload_rollout}
        # A loaded trainer is on the device, and an engine that starts takes everything at once.
        self._held = {"trainer": set(TRAINER), "engine": set(ENGINE)}
        self._timeout, self._seconds = timeout, Counter()
        self._turn, self._error = asyncio.Lock(), None
        self._filled = False
        self.purpose: str | None = None

    @asynccontextmanager
    async def at(self, purpose: str) -> AsyncIterator[None]:
        """Held while the purpose uses the memory; the caller sees to it that purposes do not overlap.

        Raises:
            SyncError: a rollout would be served by weights that no sync has brought.
        """
        if purpose == "recover":
            async with self._visit():
                yield
            return
        await self._to(purpose)
        if purpose == "sync":
            self._filled = False
        yield
        if purpose == "sync":
            self._filled = True

    def figures(self) -> dict[str, float]:
        """Seconds of each kind of call since the last time, as perf/ metrics."""
        metrics = {f"perf/{name}_time": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return metrics

    async def _to(self, purpose: str) -> None:
        if purpose == "rollout" and not self._filled:
            raise SyncError("the engine's weights are released, and a rollout is about to start",
                            code="engine-weights-released", who="hand-over", got=f"{self.purpose} before it",
                            fix="run a weight sync between training and rollouts")
        if self.purpose == purpose:
            return
        async with self._turn:
            if self._error is not None:
                raise self._error
            if self.purpose != purpose:
                await _whole(self._move(purpose))

    @asynccontextmanager
    async def _visit(self):
        """A restarted server is sent its weights while others go on: the trainer's come to the device for it alone."""
        async with self._turn:
            if self._error is not None:
                raise self._error
            absent = {"weights"} - self._held["trainer"]
            await _whole(self._change("trainer", "onload", absent))
            try:
                yield
            finally:
                await _whole(self._change("trainer", "offload", absent))

    async def _move(self, purpose: str) -> None:
        trainer, engine = TABLE[purpose]
        row = {"trainer": set(trainer if self._moves["trainer"] else TRAINER),
               "engine": set(engine if self._moves["engine"] else ENGINE)}
        self.purpose = None
        try:
            for side, method in (("trainer", "offload"), ("engine", "release")):
                await self._change(side, method, self._held[side] - row[side])
            for side, method in (("trainer", "onload"), ("engine", "occupy")):
                await self._change(side, method, row[side] - self._held[side])
        except BaseException as error:
            self._error = error if isinstance(error, Exception) else SyncError("offloading was interrupted",
                                                                               code="offload-interrupted")
            raise
        self.purpose = purpose

    async def _change(self, side: str, method: str, parts: set[str]) -> None:
        if not parts:
            return
        if side == "engine" and "weights" in parts:
            self._filled = False
        tags = tuple(tag for tag in (TRAINER if side == "trainer" else ENGINE) if tag in parts)

        def late() -> WaitError:
            return WaitError(f"the engine did not {method} {', '.join(tags)} within {self._timeout:g} s",
                             who="hand-over", code="offload-timeout", fix="look at the engines' logs in logs/")

        begin = time.perf_counter()
        async with within(self._timeout if side == "engine" else None, late):
            await self._calls[method](tags)
        self._seconds[f"{side}_{method}"] += time.perf_counter() - begin
        if method in ("onload", "occupy"):
            self._held[side] |= parts
        else:
            self._held[side] -= parts


async def _whole(work: Coroutine) -> None:
    """Do all of it, also when the caller is cancelled meanwhile; for at most GRACE seconds then."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, whoever was there to hear of it
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task], timeout=GRACE)
        task.cancel()
        raise
