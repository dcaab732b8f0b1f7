"""Tasks beside an engine's calls: what becomes of them, and of an error in one of them."""

import asyncio

import pytest
from miles_sglang.background import Background, together

from miles_core.errors import EngineError


async def ends(log):
    """Says when it begins, and when it is cancelled."""
    log.append("begun")
    try:
        await asyncio.sleep(60)
    finally:
        log.append("cancelled")


def test_closed_it_has_cancelled_all_and_takes_nothing_until_it_is_opened():
    log = []

    async def run():
        background = Background(log.append)
        background.spawn(ends(log))
        background.watch(ends(log))
        await asyncio.sleep(0)
        await background.close()
        assert background.closed and log == ["begun", "begun", "cancelled", "cancelled"]
        background.spawn(ends(log))
        await asyncio.sleep(0)
        assert len(log) == 4
        background.open()
        background.spawn(ends(log))
        await asyncio.sleep(0)
        await background.close()
        assert log[4:] == ["begun", "cancelled"] and background.failure is None

    asyncio.run(asyncio.wait_for(run(), 30))


@pytest.mark.parametrize("error, code", [
    (EngineError("it died", code="server-died", got=7, fix="look"), "server-died"),
    (KeyError("host"), "server-watchdog-failed"),
], ids=["of Miles", "of the code"])
def test_what_a_watch_raises_is_the_failure_and_is_told(error, code):
    told = []

    async def fails():
        raise error

    async def run():
        background = Background(told.append)
        background.watch(fails())
        while not told:
            await asyncio.sleep(0)
        assert told == [background.failure] and background.failure.code == code
        assert error in (background.failure, background.failure.__cause__)
        await background.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_the_first_error_of_calls_together_ends_the_others():
    log = []

    async def fails():
        await asyncio.sleep(0)
        raise EngineError("it died", code="server-died", got=7, fix="look")

    async def value(number):
        return number

    async def run():
        assert await together(value(number) for number in range(3)) == [0, 1, 2]
        with pytest.raises(EngineError):
            await together([ends(log), fails()])
        assert log == ["begun", "cancelled"]

    asyncio.run(asyncio.wait_for(run(), 30))
