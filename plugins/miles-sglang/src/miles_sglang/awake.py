"""A clock that stands still while the event loop is blocked: the silence of others is ours then."""

from __future__ import annotations

import asyncio
import weakref

from miles_core.waits import BEAT


class _Awake:
    """Counts the seconds of a loop; of those in which it is blocked, at most two beats."""

    def __init__(self) -> None:
        self._seconds, self._last = 0.0, asyncio.get_running_loop().time()
        self._beat()

    def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        self._seconds, self._last = self(), loop.time()
        loop.call_later(BEAT, self._beat)

    def __call__(self) -> float:
        return self._seconds + min(asyncio.get_running_loop().time() - self._last, 2 * BEAT)


_counts: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Awake] = weakref.WeakKeyDictionary()


def awake() -> float:
    """Seconds that the running event loop was not blocked for, since this was first asked: a clock for judging others'
    silence by."""
    loop = asyncio.get_running_loop()
    if loop not in _counts:
        _counts[loop] = _Awake()
    return _counts[loop]()
