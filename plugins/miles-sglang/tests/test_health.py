"""Health checks are answered whatever keeps the driver's loop busy."""

import asyncio
import contextlib
import threading
import time

import pytest
from miles_sglang.client import Client
from miles_sglang.health import Health
from wire import Wire

from miles_core.errors import EngineError


@contextlib.contextmanager
def served():
    """A server in a loop of its own."""
    wires, began, ended = [], threading.Event(), threading.Event()

    async def serve():
        async with Wire() as wire:
            wires.append(wire)
            began.set()
            await asyncio.to_thread(ended.wait)

    server = threading.Thread(target=asyncio.run, args=(serve(),))
    server.start()
    try:
        assert began.wait(20)
        yield wires[0]
    finally:
        ended.set()
        server.join()


@pytest.mark.parametrize(("turn", "beat"), [(0.8, 1.0), (1.2, 0.1)], ids=["always busy", "blocked"])
def test_no_healthy_server_is_declared_dead_while_the_loop_is_kept_busy(engine_over, monkeypatch, turn, beat):
    """Each turn of the loop takes almost as long as a server may be silent, and counts as the loop's own time; or it
    takes longer. A server that hangs is found all the same."""
    for module in ("miles_core.waits", "miles_sglang.awake"):
        monkeypatch.setattr(f"{module}.BEAT", beat)

    async def drive(wire):
        engine = engine_over(wire, health_check_timeout=1.0)
        await engine.start()
        try:
            until = time.monotonic() + 8
            while time.monotonic() < until:
                time.sleep(turn)
                await asyncio.sleep(0)
            assert not engine.events and engine.servers[0].alive
            wire.alive = False
            async with asyncio.timeout(20):
                while "engine_lost" not in engine.events:
                    await asyncio.sleep(0.02)
        finally:
            wire.alive = True
            await engine.stop()

    with served() as wire:
        asyncio.run(drive(wire))


def test_a_question_is_bounded_and_its_thread_ends():
    async def ask():
        async with Wire() as wire:
            health, client = Health(), Client(wire.url, "engine 0")
            assert (await health.ask(client, lambda one: one.model_info(None), 10))["tp_size"] == 1
            wire.alive = False
            with pytest.raises(EngineError) as error:
                await health.ask(client, lambda one: one.model_info(None), 0.2)
            assert error.value.code == "server-health-timeout" and "engine 0" in error.value.who
            wire.alive = True
            waiting = asyncio.ensure_future(health.ask(client, lambda one: asyncio.sleep(60), 60))
            await asyncio.sleep(0.1)
            async with asyncio.timeout(10):
                await health.close()
                await asyncio.wait([waiting])
                while any(thread.name == "health" for thread in threading.enumerate()):
                    await asyncio.sleep(0.01)

    asyncio.run(ask())
