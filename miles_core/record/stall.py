"""Stall: who blocks the event loop, said while it is blocked, and signals that end the run all the same.

Generators, async scorers, filters and sources run in the loop's thread. One that computes or waits there without
`await` stops everything else that does: heartbeats, timeouts, the answer to Ctrl-C. A thread looks on from outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from types import FrameType

from miles_core.record.journal import Journal

LIMIT = 5.0
"""Seconds without a turn of the loop that are told of; then again after twice as long."""
_HOOK = re.compile(r"<hook (\S+) of plugin (.+)>")


@contextlib.contextmanager
def watched(journal: Journal, beat: Callable[..., None], every: float, limit: float = LIMIT) -> Iterator[None]:
    """Watch the running loop, which is this thread's, as long as the block lasts.

    Args:
        beat: writes a heartbeat with further fields; called from the watching thread while the loop is blocked.
        every: seconds between heartbeats; 0 for none.
    """
    loop, thread, over = asyncio.get_running_loop(), threading.get_ident(), threading.Event()
    turn = [time.monotonic()]  # when the loop last had one

    def alive() -> None:
        turn[0] = time.monotonic()
        if not over.is_set():
            loop.call_later(limit / 4, alive)

    def watch() -> None:
        report, reported = limit, 0.0
        while not over.wait(limit / 4):
            seconds = time.monotonic() - turn[0]
            blocker = blocking(sys._current_frames().get(thread)) if seconds >= limit else None
            if blocker is None:
                report, reported = limit, 0.0
                continue
            with contextlib.suppress(Exception):  # a full disk is found out by the loop, once it goes on
                if seconds >= report:
                    report = 2 * seconds
                    journal.event("loop_blocked", seconds=seconds, **blocker, text=_told(seconds, **blocker))
                if every and seconds >= reported + every:
                    reported = seconds
                    beat(blocked_s=seconds, **blocker)

    alive()
    threading.Thread(target=watch, name="watchdog", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _told(seconds: float, plugin: str | None, hook: str | None, where: str) -> str:
    whose = f"plugin {plugin}, hook {hook}, " if plugin else ""
    return (f"the event loop has been blocked for {seconds:.0f} s by {whose}{where}; meanwhile nothing else goes on. "
            "Move blocking code into a thread (await asyncio.to_thread(...)). To end the run, send SIGTERM or Ctrl-C "
            "twice")


def blocking(frame: FrameType | None) -> dict[str, str | None] | None:
    """{"plugin", "hook", "where"} of what a thread is in the midst of; None while the loop waits for events.

    Args:
        frame: the thread's innermost.

    `where` is FILE:LINE FUNCTION, in the plugin's own file where a plugin's hook is what runs.
    """
    frames = [one for one, _ in traceback.walk_stack(frame)] if frame is not None else []
    if not frames or frames[0].f_code.co_filename.endswith("selectors.py"):
        return None
    own, plugin, hook = frames[0], None, None
    for place, one in enumerate(frames):
        if place and (match := _HOOK.fullmatch(one.f_code.co_filename)):
            file = frames[place - 1].f_code.co_filename
            own = next(inner for inner in frames if inner.f_code.co_filename == file)
            hook, plugin = match.groups()
            break
    return {"plugin": plugin, "hook": hook,
            "where": f"{own.f_code.co_filename}:{own.f_lineno} {own.f_code.co_qualname}"}


async def terminable(work: Awaitable[int]) -> int:
    """Do work that SIGTERM cancels, and SIGHUP, unless nohup has it ignored. After a first signal of any kind they
    raise KeyboardInterrupt right where the main thread is, since a loop that is blocked cancels nothing. asyncio does
    the same for SIGINT. Not by way of that one: a shell's background job ignores it."""
    task = asyncio.current_task()

    def handle(number: int, frame: FrameType | None) -> None:
        if task.cancelling():
            raise KeyboardInterrupt
        task.cancel()
        task.get_loop().call_soon_threadsafe(lambda: None)  # wakes it

    main = threading.current_thread() is threading.main_thread()  # no other handles signals; a notebook's run has none
    closed = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []
    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, *closed) if main}
    try:
        return await work
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
