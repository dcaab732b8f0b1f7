"""What every way of bringing weights to an engine has to satisfy (stages/sync.py, WeightSync).

    from miles_testing import sync_contract

    def test_contract():
        sync_contract(lambda: MySync(config))
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, cast

from miles_core.errors import EngineError, MilesError
from miles_core.hosts import Handle, ThreadHost
from miles_core.stages.rollout import Engine, PauseMode
from miles_core.stages.sync import Sender, WeightSync
from miles_core.types import Rank
from miles_testing.sample_inputs import Planted

if TYPE_CHECKING:
    import torch

PATIENCE = 60.0
"""Seconds that a sync may take."""


class Weights:
    """A trainer that has only weights: a few tensors of different shapes and dtypes, other ones for each version."""

    def __init__(self) -> None:
        self.version, self.breaks = 0, False
        self.sender: Sender | None = None

    def tensors(self, version: int) -> dict[str, torch.Tensor]:
        """The weights of a version."""
        import torch

        draw = torch.Generator().manual_seed(version)
        shapes = {"embed.weight": (40, 8), "layer.0.weight": (8, 3), "layer.0.bias": (3,), "norm.weight": (1,)}
        tensors = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
        return tensors | {"half.weight": torch.randn(5, 5, generator=draw).to(torch.bfloat16)}

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The stream; breaks off in the middle where it shall."""
        for number, item in enumerate(self.tensors(self.version).items()):
            if self.breaks and number == 2:
                raise Planted("planted by the conformance kit")
            yield item

    def connect(self, sender: Sender | None) -> None:
        if self.sender is not None:
            self.sender.close()
        self.sender = sender
        if sender is not None:
            sender.open(Rank())

    def send(self, version: int) -> dict[str, float]:
        assert self.sender is not None, "the trainer is to send, and nobody has connected a sender"
        return self.sender.send(self.weights(), version)

    def to(self, version: int, breaks: bool = False) -> None:
        """What the next stream has."""
        self.version, self.breaks = version, breaks

    def close(self) -> None:
        self.connect(None)


class Shelf:
    """An engine that keeps what it is given, and whether it would have served while weights came in."""

    def __init__(self) -> None:
        self.version, self.paused = 0, False
        self.received: dict[str, torch.Tensor] = {}
        self.served: list[int] = []

    async def pause(self, mode: PauseMode = "retract") -> None:
        self.paused = True

    async def resume(self) -> None:
        self.paused = False
        self.served.append(self.version)

    async def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        if not self.paused:
            raise EngineError("weights arrive while the engine serves", code="weights-during-serving",
                              fix="pause it before the first byte")
        if version <= self.version:
            raise EngineError("the version is not newer", code="weights-version-not-newer", got=version,
                              fix="increase the version")
        from miles_core.hosts import in_daemon_thread

        self.received = await in_daemon_thread(lambda: {name: tensor.clone() for name, tensor in weights})
        self.version = version


def sync_contract(make: Callable[[], WeightSync]) -> None:
    """Every property that a weight sync has to have; for those that reach the engine by `Engine.update_weights`.

    Raises:
        AssertionError, MilesError: names the property.
    """
    asyncio.run(_arrives(make()))
    asyncio.run(_breaks(make()))


async def _synced(sync: WeightSync, trainer: Handle, engine: Shelf, version: int) -> dict[str, float]:
    try:
        async with asyncio.timeout(PATIENCE):
            return await sync.sync(trainer, cast("Engine", engine), version)
    except TimeoutError:
        raise AssertionError(f"it takes more than {PATIENCE:g} s") from None


async def _arrives(sync: WeightSync) -> None:
    """Every bit arrives, under its name, for each version in turn; the engine serves whole versions alone."""
    import torch

    trainer, engine = ThreadHost("trainer", Weights), Shelf()
    try:
        for version in (1, 2, 5):
            await trainer.to(version)
            figures = await _synced(sync, trainer, engine, version)
            sent = Weights().tensors(version)
            assert engine.version == version, f"asked for version {version}, it gave version {engine.version}"
            assert not engine.paused, "after a sync the engine serves; it is still paused"
            assert engine.received.keys() == sent.keys(), f"names differ: {engine.received.keys() ^ sent.keys()}"
            differ = [name for name, tensor in sent.items()
                      if not torch.equal(engine.received[name].to(tensor.dtype), tensor)]
            assert not differ, f"tensors that are not what was sent: {differ}"
            assert figures["tensors"] == len(sent), f"figures count {figures['tensors']} of {len(sent)} tensors"
            odd = {name: value for name, value in figures.items() if not isinstance(value, int | float)}
            assert not odd, f"figures are numbers, not {odd}"
            assert figures["bytes"] > 0, "figures say that no byte was sent"
        assert engine.served == [1, 2, 5], f"it served {engine.served}"
    finally:
        await trainer.close()


async def _breaks(sync: WeightSync) -> None:
    """A stream that breaks off is an error; what was there before is still there, and is not served meanwhile."""
    trainer, engine = ThreadHost("trainer", Weights), Shelf()
    try:
        await trainer.to(1)
        await _synced(sync, trainer, engine, 1)
        await trainer.to(2, True)
        try:
            await _synced(sync, trainer, engine, 2)
        except (Planted, MilesError):
            pass
        else:
            raise AssertionError("the trainer's stream broke off, and the sync says that it went well")
        assert engine.version == 1, "a stream that broke off gave the engine a new version"
        assert engine.paused, "after a failed transfer the engine serves; it has to stay paused"
    finally:
        await trainer.close()
