"""A reader: a process that sends the driver's requests and reads their answers.

Its argument is the descriptor of its end of a socket pair. It says that it is up under key 0, and is sent the tokenizer
or None; then calls, each with a key under which its answer goes back. None under that key ends the call.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import signal
import socket
import sys
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from miles_core.errors import EngineError, MilesError
from miles_sglang.client import RETRACTIONS, Answer, Client, Failed
from miles_sglang.packets import Channel

COLLECT = 100_000
"""Objects between two garbage collections: an answer makes thousands at once, none of them in a cycle."""


class Call(NamedTuple):
    """A request as it leaves the driver.

    Args:
        url, name: of the server or router.
        body: JSON.
        streams: whether the answer comes in pieces.
        skip_special_tokens: in its text.
    """

    url: str
    name: str
    body: bytes
    streams: bool
    skip_special_tokens: bool


class Reader:
    """Runs calls until the driver's end is gone."""

    def __init__(self, end: socket.socket):
        self._clients: dict[str, Client] = {}
        self._tasks: dict[int, asyncio.Task] = {}
        self._tokenizer = None
        self.over = asyncio.Event()
        self._channel = Channel(end, self._told, self.over.set)
        self._channel.send(0, None)

    async def close(self) -> None:
        """Drop what is left."""
        await asyncio.gather(*(client.reset() for client in self._clients.values()))

    def _told(self, key: int, message: object) -> None:
        if isinstance(message, Call):
            self._tasks[key] = asyncio.get_running_loop().create_task(self._run(key, message))
        elif isinstance(message, OSError):
            self._channel.send(key, Failed(f"a reader did not get the request: {message}"))
        elif key == 0:
            self._tokenizer = message
        elif key in self._tasks:
            self._tasks[key].cancel()

    async def _run(self, key: int, call: Call) -> None:
        try:
            answer: object = await self._read(call)
        except (Failed, MilesError) as error:
            answer = error
        except Exception as error:  # noqa: BLE001 - whatever it is, the driver waits for it
            answer = EngineError("an answer could not be read", code="reader-failed", got=repr(error), who=call.name,
                                 fix="look at logs/readers.log; --readers 0 reads in the driver")
        finally:
            del self._tasks[key]
        try:
            self._channel.send(key, answer)
        except OSError as error:
            self._channel.send(key, Failed(f"a reader could not hand over an answer: {error}"))

    async def _read(self, call: Call) -> list[Answer]:
        client = self._clients.setdefault(call.url, Client(call.url, call.name))
        pieces = (merged([piece async for piece in client.stream(call.body)]) if call.streams
                  else [await client.generate(call.body)])
        if self._tokenizer is not None:
            ids = [token for piece in pieces for token in piece.ids.tolist()]
            pieces[-1].text = self._tokenizer.decode(ids, skip_special_tokens=call.skip_special_tokens) if ids else ""
        return pieces


def merged(pieces: Iterable[Answer]) -> list[Answer]:
    """The same answer in fewer pieces: one for each stretch in which nothing changes that is told of a piece.

    What tells about a piece is also what the one before it stated: the version that its tokens have, and whether the
    request was computed again in between.
    """
    before: tuple[object, ...] = ()
    stretches: list[tuple[object, Answer]] = []
    for piece in pieces:
        states = piece.rid, piece.version, piece.counts.get(RETRACTIONS, 0)
        stretches.append(((before, states), piece))
        before = states
    return [_one([piece for _, piece in stretch]) for _, stretch in itertools.groupby(stretches, lambda pair: pair[0])]


def _one(pieces: list[Answer]) -> Answer:
    last = pieces[-1]
    last.ids, last.log_probs = (np.concatenate([getattr(piece, name) for piece in pieces])
                                for name in ("ids", "log_probs"))
    return last


async def _serve(end: socket.socket) -> None:
    reader = Reader(end)
    await reader.over.wait()
    await reader.close()


def main() -> None:
    """Until the driver is gone; Ctrl-C is the driver's to answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()
    gc.set_threshold(COLLECT)
    asyncio.run(_serve(socket.socket(fileno=int(sys.argv[1]))))
