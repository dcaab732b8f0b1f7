"""A plugin that blocks the event loop is named while it does, with the line; one that waits as it should is not."""

from __future__ import annotations

import asyncio
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from miles_core.config.tables import RunConfig
from miles_core.plugins import bind, select
from miles_core.record.console import Console
from miles_core.record.directory import RunDirectory
from miles_core.record.events import read
from miles_core.record.journal import Journal
from miles_core.record.stall import terminable, watched

SLOW = '''import asyncio, threading
from miles_core import hookimpl
told = threading.Event()

def waits():
    told.wait(20)


class Slow:
    name = "slow"

    @hookimpl("reward", name="blocks")
    async def blocks(self, sample):
        await asyncio.sleep(0)
        waits()
        return 1.0

    @hookimpl("reward", name="yields")
    async def yields(self, sample):
        await asyncio.sleep(0.6)
        return 1.0
'''


@pytest.mark.parametrize(("name", "told"), [("blocks", True), ("yields", False)])
def test_who_blocks_the_loop_is_told_meanwhile(tmp_path, name, told):
    (tmp_path / "slow.py").write_text(SLOW)
    hooks = bind.bind(select.select([(str(tmp_path / "slow.py"), "--plugin")], []), RunConfig(), "rollout")
    console = tmp_path / "console"
    heard = sys.modules[type(hooks.instances["slow"]).__module__].told

    async def run(journal):
        def beat(**more):
            journal.event("heartbeat", **more)
            heard.set()

        with watched(journal, beat, every=0.05, limit=0.2):
            await hooks.reward[name](None)

    with RunDirectory(tmp_path / "run") as directory, open(console, "w") as stream:
        journal = Journal(directory, Console(False, stream))
        asyncio.run(run(journal))
    events = list(read(directory.events))
    blocked = [event for event in events if event["event"] == "loop_blocked"]
    beats = [event for event in events if event["event"] == "heartbeat"]
    assert bool(blocked) == told and bool(beats) == told
    for event in [*blocked, *beats]:
        assert (event["plugin"], event["hook"]) == ("slow", "reward")
        assert event["where"] == f"{tmp_path / 'slow.py'}:6 waits"
    if told:
        assert blocked[0]["seconds"] >= 0.2 and beats[0]["blocked_s"] >= 0.2
        assert all(word in console.read_text() for word in ("plugin slow", "hook reward", "slow.py:6"))


async def begun_and_ended(number: int = signal.SIGTERM) -> object:
    """What handles a signal inside."""
    return await terminable(asyncio.to_thread(signal.getsignal, number))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_run_in_the_main_thread_handles_signals_as_long_as_it_lasts(number):
    before = signal.getsignal(number)
    assert asyncio.run(begun_and_ended(number)) != before
    assert signal.getsignal(number) == before


def test_a_run_under_nohup_outlives_its_terminal():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert asyncio.run(begun_and_ended(signal.SIGHUP)) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_run_in_another_thread_leaves_signals_alone():
    before = signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(asyncio.run, begun_and_ended()).result(60) == before
