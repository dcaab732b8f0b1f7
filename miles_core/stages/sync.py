"""Stage 9, sync: the trainer's weights reach the engine.

A sync is pause -> transfer -> new version -> verify -> resume. The engine serves nothing between the first byte and the
verified version, and when a transfer fails it stays paused: a half-updated engine never answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from miles_core.hosts import Handle
    from miles_core.stages.rollout import Engine, PauseMode
    from miles_core.types import Rank

WRITTEN: ContextVar[Any] = ContextVar("called with a complete folder of weights and the servers, before they load it")


class WeightSync(Protocol):
    """How weights get from the trainer to the engine."""

    async def sync(self, trainer: Handle, engine: Any, version: int) -> dict[str, float]:
        """Bring the engine, one that this sync reaches, to `version`; returns figures such as tensors and bytes.

        Called again for the version that the engine has, it brings up only what lags behind: a server that was
        restarted.
        """


class Sender(Protocol):
    """The trainer's half of a sync that does not pass through the driver: `Trainer.connect` puts one on every rank.

    Made by the driver and pickled, so it holds addresses and settings alone until `open`.
    """

    takes_stacks: bool = False  # tensors [experts, ...], in whose names 0-63 stands for a number; without it, none

    def open(self, rank: Rank) -> None:
        """Get ready on this rank: groups, connections. Every rank is asked, in the same order."""

    def send(self, stream: Iterator[tuple[str, torch.Tensor]], version: int) -> dict[str, float]:
        """Send the whole stream; every rank goes through all of it. Returns figures; the first rank's count.

        Raises:
            SyncError: names the server and what it said; what it holds now must not serve.
        """

    def close(self) -> None:
        """Leave groups and connections; bounded."""


class InProcess:
    """Trainer and engine on one machine: the engine copies from the trainer's own tensors."""

    def __init__(self, mode: PauseMode):
        self.mode = mode

    async def sync(self, trainer: Handle, engine: Engine, version: int) -> dict[str, float]:
        await engine.pause(self.mode)
        sent: dict[str, float] = {"tensors": 0, "bytes": 0}

        def counted(stream: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
            for name, tensor in stream:
                sent["tensors"] += 1
                sent["bytes"] += tensor.numel() * tensor.element_size()
                yield name, tensor

        await engine.update_weights(counted(await trainer.weights()), version)
        await engine.resume()
        return sent
