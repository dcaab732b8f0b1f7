"""Stage 9, sync: the trainer's weights reach the engine; and the leases that say whose turn the hardware is.

A sync is pause -> transfer -> new version -> resume. The engine serves nothing between the first byte and the new
version, and when a transfer fails it stays paused: a half-updated engine never answers.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from miles_core.hosts import Handle
    from miles_core.stages.rollout import Engine, PauseMode

Purpose = Literal["rollout", "train", "sync"]


class WeightSync(Protocol):
    """How weights get from the trainer to the engine."""

    async def sync(self, trainer: Handle, engine: Engine, version: int) -> dict[str, float]:
        """Bring the engine to `version`; returns figures such as the number of tensors and bytes."""


class Placement(Protocol):
    """Who may use the hardware, when rollout and training share it."""

    def lease(self, purpose: Purpose) -> AbstractAsyncContextManager[None]:
        """Held while the purpose uses the hardware. Rollouts share a lease; train and sync hold it alone."""


class InProcess:
    """Trainer and engine on one machine: the engine copies from the trainer's own tensors."""

    def __init__(self, mode: PauseMode):
        self.mode = mode

    async def sync(self, trainer: Handle, engine: Engine, version: int) -> dict[str, float]:
        await engine.pause(self.mode)
        sent = {"tensors": 0, "bytes": 0}

        def counted(stream):
            for name, tensor in stream:
                sent["tensors"] += 1
                sent["bytes"] += tensor.numel() * tensor.element_size()
                yield name, tensor

        await engine.update_weights(counted(await trainer.weights()), version)
        await engine.resume()
        return sent


class Local:
    """Each side holds hardware of its own: every lease is granted at once."""

    @asynccontextmanager
    async def lease(self, purpose: Purpose):
        yield


class Shared:
    """One piece of hardware: rollouts together, train and sync alone, in the order of asking.

    Needs max_lag 0, else the producer would hold it while the consumer waits for its turn.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Condition()
        self._rollouts, self._alone, self._waiting = 0, False, 0

    @asynccontextmanager
    async def lease(self, purpose: Purpose):
        async with self._turn:
            if purpose == "rollout":
                await self._turn.wait_for(lambda: not self._alone and not self._waiting)
                self._rollouts += 1
            else:
                self._waiting += 1
                try:
                    await self._turn.wait_for(lambda: not self._alone and not self._rollouts)
                finally:
                    self._waiting -= 1
                self._alone = True
        try:
            yield
        finally:
            async with self._turn:
                if purpose == "rollout":
                    self._rollouts -= 1
                else:
                    self._alone = False
                self._turn.notify_all()
