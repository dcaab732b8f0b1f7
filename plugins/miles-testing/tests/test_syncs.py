"""The kit of weight syncs: the core's own pass, and each check has a sync that it catches."""

from __future__ import annotations

import asyncio

import pytest
from miles_testing import sync_contract, syncs, tiny_checkpoint
from miles_testing.sample_inputs import Planted

from miles_core.config.tables import Checkpoint, Perf, RunConfig
from miles_core.errors import MilesError
from miles_core.stages.sync import InProcess


def test_syncs_pass():
    from miles_local.shared_memory import SharedMemory

    config = RunConfig(checkpoint=Checkpoint(hf_checkpoint=str(tiny_checkpoint())),
                       perf=Perf(bf16=False, update_weight_buffer_size=2000, weight_sync_timeout=20.0))
    sync_contract(lambda: InProcess("retract"))
    sync_contract(lambda: SharedMemory(config))


class Plain:
    """A sync in steps that a broken one changes."""

    async def sync(self, trainer, engine, version):
        await engine.pause()
        stream = [item for name, tensor in await trainer.weights() for item in self.pack(name, tensor)]
        await engine.update_weights(stream, self.name(version))
        await engine.resume()
        return self.figures(stream)

    def pack(self, name, tensor):
        return [(name, tensor)]

    def name(self, version):
        return version

    def figures(self, stream):
        return {"tensors": len(stream), "bytes": sum(tensor.nbytes for _, tensor in stream)}


def plain(**steps):
    """A plain sync with some steps done otherwise."""
    return type("Broken", (Plain,), steps)


class Hangs(Plain):
    async def sync(self, trainer, engine, version):
        await asyncio.Event().wait()


class Rude(Plain):
    async def sync(self, trainer, engine, version):
        await engine.update_weights(await trainer.weights(), version)


class Unconnected(Plain):
    async def sync(self, trainer, engine, version):
        return await trainer.send(version)


class Leaves(Plain):
    async def sync(self, trainer, engine, version):
        figures = await super().sync(trainer, engine, version)
        await engine.pause()
        return figures


class Doubtful(Plain):
    async def sync(self, trainer, engine, version):
        figures = await super().sync(trainer, engine, version)
        await engine.resume()
        return figures


class Hasty(Plain):
    async def sync(self, trainer, engine, version):
        try:
            return await super().sync(trainer, engine, version)
        except Planted:
            await engine.resume()
            raise


class Silent(Plain):
    async def sync(self, trainer, engine, version):
        try:
            return await super().sync(trainer, engine, version)
        except Planted:
            return self.figures([])


class Partial(Plain):
    """Gives the engine what came, and says afterwards that it was not all."""

    async def sync(self, trainer, engine, version):
        await engine.pause()
        stream, broken = [], None
        try:
            for item in await trainer.weights():
                stream.append(item)
        except Planted as error:
            broken = error
        await engine.update_weights(stream, version)
        if broken is not None:
            raise broken
        await engine.resume()
        return self.figures(stream)


BROKEN = {
    "it takes more than 0.1 s": Hangs,
    "while the engine serves": Rude,
    "the version is not newer": plain(name=lambda self, version: version - 1),
    "the trainer is to send, and nobody has connected a sender": Unconnected,
    "asked for version 1, it gave version 2": plain(name=lambda self, version: version + 1),
    "it is still paused": Leaves,
    "names differ: .'norm.weight'.": plain(
        pack=lambda self, name, tensor: [] if name.startswith("norm") else [(name, tensor)]),
    "tensors that are not what was sent: .'embed.weight'": plain(
        pack=lambda self, name, tensor: [(name, tensor.bfloat16())]),
    "figures count 3 of 5 tensors": plain(figures=lambda self, stream: {"tensors": 3, "bytes": 1}),
    "figures are numbers, not .'took'": plain(figures=lambda self, stream: {"tensors": 5, "bytes": 1, "took": "long"}),
    "figures say that no byte was sent": plain(figures=lambda self, stream: {"tensors": 5, "bytes": 0}),
    r"it served \[1, 1, 2, 2, 5, 5\]": Doubtful,
    "the trainer's stream broke off, and the sync says that it went well": Silent,
    "a stream that broke off gave the engine a new version": Partial,
    "after a failed transfer the engine serves": Hasty,
}  # fmt: skip


@pytest.mark.parametrize("words", BROKEN)
def test_a_sync_that_breaks_a_property_is_caught(words, monkeypatch):
    monkeypatch.setattr(syncs, "PATIENCE", 0.1 if BROKEN[words] is Hangs else 60.0)
    with pytest.raises((AssertionError, MilesError), match=words):
        sync_contract(BROKEN[words])


def test_the_plain_sync_passes():
    sync_contract(Plain)
