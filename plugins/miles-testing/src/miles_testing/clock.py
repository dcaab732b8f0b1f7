"""A clock that only moves when every task waits: hours of schedule in milliseconds, the same every time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any


class _Selector(selectors.DefaultSelector):
    """Instead of waiting until the next timer is due, moves the loop's time there."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("every task waits and no timer is set: the schedule is stuck")
        self.loop.now += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time; asyncio.sleep and asyncio.timeout follow it."""

    def __init__(self) -> None:
        self.now = 0.0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now


def run_virtual(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run a coroutine function on virtual time.

    Raises:
        RuntimeError: everybody waits for everybody.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main())
