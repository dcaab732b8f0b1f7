"""Placement: where the trainer's ranks and the engine's servers run, and whose turn the hardware is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Literal, Protocol

from miles_core.hosts import Handle, process_group

if TYPE_CHECKING:
    from miles_core.config.tables import RunConfig
    from miles_core.stages.rollout import Engine

Purpose = Literal["start", "rollout", "train", "sync", "save", "recover"]
"""What hardware is used for: engines start, sample, the trainer scores and steps, weights travel, the trainer writes a
checkpoint while the engine keeps its weights; "recover" is a sync of a restarted engine while rollouts go on."""


class Placement(Protocol):
    """Gives hosts to what needs a process of its own, and turns at the hardware."""

    def trainer(self, factory: Callable, *args: object) -> Handle:
        """A host for every rank of the trainer behind one handle; `factory(*args, rank)` is made in each."""

    def servers(self, factory: Callable, *args: object) -> list[Handle]:
        """A host for every node of every engine, engine after engine; `factory(*args, seat)` is made in each."""

    def attach(self, trainer: Handle, engine: Engine | None) -> None:
        """Who hands over at a change of turns. Called once, before the first lease."""

    def lease(self, purpose: Purpose) -> AbstractAsyncContextManager[None]:
        """Held while the purpose uses the hardware. Rollouts share a lease; the others hold it alone."""

    async def close(self) -> None:
        """End what the placement itself started; bounded."""


class Turns:
    """Leases of one piece of hardware: rollouts together, the others alone.

    A rollout that may begin does not wait for others that wait for their turn alone: the room in the buffer bounds how
    many there are. That needs max_lag 0, else the producer would hold the hardware while the consumer waits.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Condition()
        self._rollouts, self._alone = 0, False

    @asynccontextmanager
    async def __call__(self, purpose: Purpose):
        async with self._turn:
            if purpose == "rollout":
                await self._turn.wait_for(lambda: not self._alone)
                self._rollouts += 1
            else:
                await self._turn.wait_for(lambda: not self._alone and not self._rollouts)
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


class Local:
    """Processes of this machine. Each side holds hardware of its own, or with --colocate they take turns."""

    def __init__(self, config: RunConfig):
        self.config = config
        self._turns = Turns() if config.perf.colocate else None

    def trainer(self, factory: Callable, *args: object) -> Handle:
        perf = self.config.perf
        return process_group("trainer", perf.actor_num_nodes * perf.actor_num_gpus_per_node, factory, *args)

    def servers(self, factory: Callable, *args: object) -> list[Handle]:
        raise NotImplementedError

    def attach(self, trainer: Handle, engine: Engine | None) -> None:
        self._trainer, self._engine = trainer, engine

    @asynccontextmanager
    async def lease(self, purpose: Purpose):
        if self._turns is None or purpose == "recover":
            yield
            return
        async with self._turns(purpose):
            yield

    async def close(self) -> None:
        """Handles end what they host."""
