"""Placement: where the trainer's ranks and the engine's servers run, and whose turn the hardware is."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from miles_core.config.environment import environment
from miles_core.config.hardware import gpus, trainer_gpus
from miles_core.errors import ConfigError
from miles_core.handover import HandOver
from miles_core.hosts import Handle, ThreadHost, process_group
from miles_core.types import NodeSlot

if TYPE_CHECKING:
    from miles_core.config.tables import RunConfig
    from miles_core.stages.rollout import Engine

Purpose = Literal["start", "rollout", "train", "sync", "save", "recover"]
"""What hardware is used for: engines start, sample, the trainer scores and steps, weights travel, the trainer writes a
checkpoint while the engine keeps its weights; "recover" is a sync of a restarted engine while rollouts go on."""


class Placement(Protocol):
    """Gives hosts to what needs a process of its own, and turns at the hardware.

    Args:
        environment: variables that the trainer's ranks get beside what they inherit, known once it is open.
    """

    environment: Mapping[str, str]

    async def open(self) -> None:
        """Get hold of the hardware; bounded. Called once, before anything else.

        Raises:
            ConfigError: there is too little of it; says what does not fit and what is there.
        """

    def trainer(self, factory: Callable[..., Any], *args: object) -> Handle:
        """A host for every rank of the trainer behind one handle; `factory(*args, rank)` is made in each."""

    def servers(self, factory: Callable[..., Any], *args: object) -> list[Handle]:
        """A host for every node of every engine, engine after engine; `factory(*args, seat)` is made in each."""

    def attach(self, trainer: Handle, engine: Engine | None) -> None:
        """Who hands over at a change of turns. Called once, before the first lease."""

    def lease(self, purpose: Purpose) -> AbstractAsyncContextManager[None]:
        """Held while the purpose uses the hardware. Rollouts share a lease; the others hold it alone."""

    def figures(self) -> dict[str, float]:
        """Metrics of what was handed over since the last time."""

    async def close(self) -> None:
        """End what the placement itself started; bounded."""


class Turns:
    """Leases of one piece of hardware: rollouts together, a recovery beside them, the others alone.

    A rollout that may begin does not wait for others that wait for their turn alone: the room in the buffer bounds how
    many there are. That needs max_lag 0, else the producer would hold the hardware while the consumer waits.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Condition()
        self._together, self._alone = 0, False

    @asynccontextmanager
    async def __call__(self, purpose: Purpose) -> AsyncIterator[None]:
        together = purpose in ("rollout", "recover")
        async with self._turn:
            if together:
                await self._turn.wait_for(lambda: not self._alone)
                self._together += 1
            else:
                await self._turn.wait_for(lambda: not self._alone and not self._together)
                self._alone = True
        try:
            yield
        finally:
            async with self._turn:
                if together:
                    self._together -= 1
                else:
                    self._alone = False
                self._turn.notify_all()


class Leases:
    """Whose turn it is, whatever the hosts are.

    With --colocate both sides take turns at the same GPUs, and their memory is handed over. Without it rollouts have
    hardware of their own; what is left to order is the trainer's: a restarted server is not sent weights amid a step.
    """

    def __init__(self, config: RunConfig):
        self.config = config
        self.environment: Mapping[str, str] = {}
        self._turns = Turns()
        self._hand_over: HandOver | None = None

    def attach(self, trainer: Handle, engine: Engine | None) -> None:
        perf = self.config.perf
        if perf.colocate and engine is not None and not self.config.debug.debug_rollout_only:
            self._hand_over = HandOver(trainer, engine, offload_train=perf.offload_train is not False,
                                       offload_rollout=perf.offload_rollout is not False,
                                       timeout=perf.weight_sync_timeout)

    @asynccontextmanager
    async def lease(self, purpose: Purpose) -> AsyncIterator[None]:
        if purpose == "rollout" and not self.config.perf.colocate:
            yield
            return
        memory = nullcontext() if self._hand_over is None else self._hand_over.at(purpose)
        async with self._turns(purpose), memory:
            yield

    def figures(self) -> dict[str, float]:
        return {} if self._hand_over is None else self._hand_over.figures()


class Local(Leases):
    """Processes of this machine. The first GPUs are the trainer's; the engines' come next, or are the same."""

    async def open(self) -> None:
        gpus, (count, size) = visible_gpus(), engines(self.config)
        if gpus and demand(self.config) > len(gpus):
            raise ConfigError(f"the run needs {demand(self.config)} GPUs, and this machine has {len(gpus)}",
                              code="gpus-too-few", got=f"trainer {trainer_gpus(self.config)}, engines {count} x {size}",
                              who="--placement local",
                              fix="use fewer, share them with --colocate, or add machines with --placement ray")
        self.environment = environment(self.config, gpus=bool(gpus))

    def trainer(self, factory: Callable[..., Any], *args: object) -> Handle:
        return process_group("trainer", trainer_gpus(self.config), factory, *args, logs=logs(self.config),
                             environment=self.environment)

    def servers(self, factory: Callable[..., Any], *args: object) -> list[Handle]:
        gpus, first = visible_gpus(), first_engine_gpu(self.config)
        count, size = engines(self.config)
        seats = [NodeSlot(engine=i, gpus=gpus[first + i * size : first + (i + 1) * size]) for i in range(count)]
        return [ThreadHost(f"engine {seat.engine}", factory, *args, seat) for seat in seats]

    async def close(self) -> None:
        """Handles end what they host."""


def engines(config: RunConfig) -> tuple[int, int]:
    """How many engines a placement hosts, and the GPUs of each."""
    perf, size = config.perf, config.perf.rollout_num_gpus_per_engine
    if config.rollout.engine in (None, "local") or "external" in config.understood or config.debug.debug_train_only:
        return 0, size
    total = perf.rollout_num_gpus or (trainer_gpus(config) if perf.colocate else size)
    return max(1, total // size), size


def first_engine_gpu(config: RunConfig) -> int:
    """Where the engines' GPUs begin, in the order trainer, engines."""
    return 0 if config.perf.colocate or config.debug.debug_rollout_only else trainer_gpus(config)


def demand(config: RunConfig) -> int:
    """GPUs of trainer and engines together."""
    count, size = engines(config)
    trainer = 0 if config.debug.debug_rollout_only else trainer_gpus(config)
    return max(trainer, first_engine_gpu(config) + count * size)


def logs(config: RunConfig) -> Path:
    """The folder that every process writes its log to."""
    return Path(cast("str", config.checkpoint.run_dir)).resolve() / "logs"  # the plan has set it


def visible_gpus() -> tuple[int, ...]:
    """Numbers of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES counts them.

    Raises:
        ConfigError: CUDA_VISIBLE_DEVICES holds names in place of numbers.
    """
    numbers = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        return tuple(range(gpus())) if numbers is None else tuple(map(int, numbers.split(",")[: gpus()]))
    except ValueError:
        raise ConfigError("CUDA_VISIBLE_DEVICES should list GPUs by number", code="visible-gpus-not-numbers",
                          got=numbers, who="--placement local", fix="write CUDA_VISIBLE_DEVICES=0,1") from None
