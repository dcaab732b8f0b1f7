"""Servers that die of what they are asked for, as processes of their own: what is told of it, and how it ends."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import wire
from miles_sglang.engine import SglangEngine
from test_engine import check

from conftest import Letters
from miles_core.config.tables import Perf
from miles_core.errors import EngineDiedError, EngineError
from miles_core.stages.placement import Local


def over(config, work, engines=1, **options):
    """What `work(engine)` returns on an engine that starts so many stand-ins, and what the engine told."""
    own = {"rollout_external": False, "server_command": [sys.executable, wire.__file__]}
    config = replace(config, perf=Perf(rollout_num_gpus=engines, bf16=False),
                     options={"sglang": {**config.options["sglang"], **own, **options}})
    events = []

    async def story():
        engine = SglangEngine(config, Letters(), Local(config))
        engine.event = lambda kind, **fields: events.append({"event": kind, **fields})
        await engine.start()
        try:
            async with asyncio.timeout(60):
                return await work(engine)
        finally:
            await engine.stop()

    return asyncio.run(story()), events


async def dies(engine, request, restarts):
    """Ask the first server for what ends it, until it has been started anew so often."""
    dying = asyncio.ensure_future(engine.generate(request))
    while engine.servers[0].restarts < restarts:
        await asyncio.sleep(0.02)
    dying.cancel()
    await asyncio.wait([dying])


def test_a_server_that_dies_of_a_request_says_of_what_and_is_started_as_often_as_is_said(config, ask, monkeypatch):
    """Its death is seen by the request that fails, before that has spent its tries on a dead server."""
    monkeypatch.setattr("miles_sglang.server_pool.LOOK", 60.0)

    async def work(engine):
        with pytest.raises(EngineDiedError) as caught:
            await engine.generate(ask("bad", 3, prompt=(wire.DIES, 5)))
        return caught.value

    error, events = over(config, work)
    raised, log = "RuntimeError: no kernel for this prompt", str(Path(config.checkpoint.run_dir) / "logs/engine-0.log")
    assert error.code == "server-died" and raised in error.got and log in error.fix
    lost = [event for event in events if event["event"] == "engine_lost"]
    assert len(lost) == 4 and {event["log"] for event in lost} == {log}
    for event in lost:
        assert event["why"] == f"its process ended with code -9, after {raised}"
        assert raised in event["text"] and log in event["text"]


def test_an_exception_of_an_earlier_start_is_not_why_a_server_died(config, ask):
    async def work(engine):
        for restarts, kind in enumerate((wire.DIES, wire.IS_KILLED), 1):
            await dies(engine, ask("bad", 3, prompt=(kind, 5)), restarts)
        check(await engine.generate(ask("good", 3)), 3)

    _, events = over(config, work)
    assert [event["why"].partition(" after ")[2] for event in events if event["event"] == "engine_lost"] == [
        "RuntimeError: no kernel for this prompt", ""]


def test_a_start_anew_that_fails_is_one_of_those_that_are_allowed(config, ask, tmp_path):
    """What died may hold its memory for a while."""
    async def work(engine):
        (tmp_path / "fails").touch()
        await dies(engine, ask("bad", 3, prompt=(wire.IS_KILLED, 5)), 2)
        check(await engine.generate(ask("good", 3)), 3)
        return engine.servers[0].restarts

    command = [sys.executable, wire.__file__, "--fails", str(tmp_path / "fails")]
    restarts, events = over(config, work, server_command=command)
    assert restarts == 2
    lost = [event["why"] for event in events if event["event"] == "engine_lost"]
    assert len(lost) == 2 and "while it started" in lost[1] and "RuntimeError: the memory is not free yet" in lost[1]


def test_a_request_that_kills_one_server_after_the_other_is_named_with_what_they_died_of(config, ask, monkeypatch):
    """The others are answered: none of them meets as many deaths."""
    monkeypatch.setattr("miles_sglang.engine.RETRIES", 2)

    async def work(engine):
        good = [asyncio.ensure_future(engine.generate(ask(f"good-{i}", 100))) for i in range(6)]
        await asyncio.sleep(0)
        with pytest.raises(EngineError) as caught:
            await engine.generate(ask("bad", 3, prompt=(wire.DIES, 5)))
        for response in await asyncio.gather(*good):
            check(response, 100)
        return caught.value

    error, _ = over(config, work, engines=4)
    assert error.code == "request-retries-exhausted" and "train-bad" in error.what
    assert "RuntimeError: no kernel for this prompt" in error.got
