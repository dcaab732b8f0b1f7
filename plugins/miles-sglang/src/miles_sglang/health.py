"""Health: asking servers whether they live, from a thread with a loop of its own.

The driver's loop may be busy for seconds, with answers or with a hook that computes. An answer to a health check would
lie unread meanwhile, and who waits with a timeout would take a healthy server for dead.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from miles_core.errors import EngineError
from miles_core.waits import within
from miles_sglang.client import Client

STOP_SECONDS = 5.0


class Health:
    """The thread, which starts with the first question and can be closed at any time."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._clients: dict[str, Client] = {}

    async def ask(self, client: Client, question: Callable[[Client], Coroutine[Any, Any, dict]],
                  timeout: float) -> dict:
        """What a server answers, asked by a client of the thread's own.

        Args:
            client: whose address it is.
            timeout: seconds, of which those do not count in which the thread itself was kept from running.

        Raises:
            EngineError: no answer.
        """
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(self._loop,), name="health", daemon=True).start()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(
            self._ask(client.url, client.name, question, timeout), self._loop))

    async def close(self) -> None:
        """End the thread; questions that wait are cancelled."""
        loop, self._loop = self._loop, None
        if loop is not None:
            await asyncio.wait([asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._drop(), loop))],
                               timeout=STOP_SECONDS)
            loop.call_soon_threadsafe(loop.stop)

    async def _ask(self, url: str, name: str, question: Callable[[Client], Coroutine[Any, Any, dict]],
                   timeout: float) -> dict:
        client = self._clients.setdefault(url, Client(url, name))
        late = EngineError(f"no answer within {timeout:g} s", who=f"{name} at {url}", fix="see its log",
                           code="server-health-timeout")
        async with within(timeout, lambda: late):
            return await question(client)

    async def _drop(self) -> None:
        waiting = asyncio.all_tasks() - {asyncio.current_task()}
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.gather(*(client.reset() for client in self._clients.values()))
        self._clients.clear()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()
