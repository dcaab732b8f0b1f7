"""What an engine has run beside the calls that it answers, and calls that run at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from miles_core.errors import EngineError, MilesError

T = TypeVar("T")


class Background:
    """Tasks that end with the engine; between `close` and `open` none starts.

    Args:
        failed: called with the error of a watch, which is never to end.

    Attributes:
        failure: that error; every request is to end with it.
        closed: the engine stops, or has stopped.
    """

    def __init__(self, failed: Callable[[MilesError], None]):
        self._failed = failed
        self._tasks: set[asyncio.Task[Any]] = set()
        self.failure: MilesError | None = None
        self.closed = False

    def open(self) -> None:
        """Take tasks again."""
        self.closed = False

    async def close(self) -> None:
        """Cancel all tasks, and wait for their ends."""
        self.closed = True
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run something of which nobody waits for the result."""
        if self.closed:  # nothing is left to look after
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def watch(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a watch of servers; what it raises becomes `failure`."""
        self.spawn(self._guarded(work))

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 - whatever it is, otherwise no task would watch the servers
            failure = error
            if not isinstance(failure, MilesError):
                failure = EngineError("the server watchdog failed", code="server-watchdog-failed", got=repr(error))
                failure.__cause__ = error
            self.failure = failure
            self._failed(failure)


async def together(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Results of calls that run at the same time; the first error ends the others."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
