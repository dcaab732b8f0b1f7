"""Waits: bounds that do not count the time in which the event loop itself was blocked.

While a hook parses, or computes, in the event loop, nobody reads what others have answered: their silence is ours.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from miles_core.errors import MilesError

BEAT = 0.1
"""Seconds between two looks at the clock; a gap of twice that is a loop that was blocked."""


class Bound:
    """The end of a wait, which can be moved. If the loop comes to it late it moves by as much, since an answer may lie
    there unread."""

    def __init__(self, timeout: asyncio.Timeout):
        self._timeout, self._timer = timeout, None

    def reschedule(self, when: float | None) -> None:
        """End the wait at this time of the loop; None lets it go on for ever."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if when is None else asyncio.get_running_loop().call_at(when, self._due, when)

    def expired(self) -> bool:
        """Whether the wait has ended by this."""
        return self._timeout.expired()

    def _due(self, when: float) -> None:
        now = asyncio.get_running_loop().time()
        if now - when > 2 * BEAT:
            self.reschedule(now + now - when)
        else:
            self._timeout.reschedule(now)


@contextlib.asynccontextmanager
async def within(seconds: float | None, late: Callable[[], MilesError]) -> AsyncIterator[Bound]:
    """Bound the waits of a block; None waits for ever. Gives what the bound can be moved with.

    Raises:
        what `late` makes, once `seconds` are over. A TimeoutError from inside the block stays what it is.
    """
    try:
        async with asyncio.timeout(None) as timeout:
            bound = Bound(timeout)
            bound.reschedule(None if seconds is None else asyncio.get_running_loop().time() + seconds)
            try:
                yield bound
            finally:
                bound.reschedule(None)
    except TimeoutError:
        if not timeout.expired():
            raise
        raise late() from None
