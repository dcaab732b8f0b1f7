"""A server that is found dead while the others are paused is left out of the sync, and never holds it up."""

import asyncio
from dataclasses import dataclass

import pytest
from miles_sglang.sync import sequence
from miles_sglang.sync.sequence import ServerSync

from miles_core.config.tables import RunConfig


@dataclass
class Server:
    """As much of one as a sync sees."""

    name: str
    url: str = "http://127.0.0.1:1"
    seats: tuple = ()
    size: int = 1
    version: int = 1


class Engine:
    """Has servers of version 1, of which some are found dead by a pause. Tells what was asked of it."""

    version = 1

    def __init__(self, dying: int):
        self.servers, self.told = [Server("engine 0"), Server("engine 1")], []
        self._dying = dying

    def stale(self, version):
        return [server for server in self.servers if server.version != version]

    async def pause(self, mode):
        self.told.append("pause")
        del self.servers[: self._dying]

    async def confirm(self, servers, version):
        self.told.append([server.name for server in servers])

    async def resume(self):
        self.told.append("resume")


class Trainer:
    """Keeps the sender that it was given."""

    sent = 0

    async def connect(self, targets):
        self.targets = [target.name for target in targets]

    async def send(self, version):
        self.sent += 1
        return {"tensors": 3, "bytes": 12}


@pytest.mark.parametrize(("dying", "alive"), [(0, ["engine 0", "engine 1"]), (1, ["engine 1"]), (2, [])])
def test_servers_that_a_pause_finds_dead_are_left_out(dying, alive, monkeypatch):
    asked = []
    monkeypatch.setattr(sequence, "post", lambda target, path, body, timeout: asked.append((target.name, path)))
    engine, trainer = Engine(dying), Trainer()
    figures = asyncio.run(ServerSync(RunConfig(), lambda targets: targets).sync(trainer, engine, 2))
    if alive:
        assert trainer.targets == alive and figures["tensors"] == 3
        assert sorted(asked) == [(name, "update_weight_version") for name in alive]
        assert engine.told == ["pause", alive, "resume"]
    else:
        assert trainer.sent == 0 and figures == {"tensors": 0, "bytes": 0}
        assert engine.told == ["pause", [], "resume"], "whoever comes back lags behind, and finds the way open"
