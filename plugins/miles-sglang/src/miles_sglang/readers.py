"""Readers: processes that read the servers' answers, so that the driver's loop has little to do with each.

What they take from it are HTTP, JSON, base64 and the text of the tokens; the engine gets arrays. A reader that ends is
started again when it is next needed. Its calls fail as if their connections had broken, and are sent again.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from miles_core.errors import EngineError
from miles_core.waits import within
from miles_sglang.client import Answer, Client, Failed
from miles_sglang.packets import Channel, pair
from miles_sglang.reader import Call

PROGRAM = "from miles_sglang.reader import main; main()"
"""Not -m, which would have the module twice, and its classes too."""
START_SECONDS, STOP_SECONDS = 60.0, 5.0
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**30)}
"""Buffers of megabytes come and go with each answer: memory that is given back every time is cleared every time."""


class Readers:
    """So many processes; with none, answers are read here.

    Args:
        tokenizer: of the tokenizers package, pickled to each; None leaves texts to the driver.
        log: what they say goes to its end.
        event: told "reader_lost", with the reader and why.
    """

    def __init__(self, count: int, tokenizer: Any, log: Path, event: Callable[..., None]):
        self._tokenizer, self._log, self._event = tokenizer, log, event
        self._keys = itertools.count(1)
        self._all = [_Process(f"reader {number}", self) for number in range(count)]

    async def open(self) -> None:
        """Start them all.

        Raises:
            EngineError: one does not come up.
        """
        for process in self._all:
            process.start()
        late = EngineError(f"the readers of answers did not come up within {START_SECONDS:g} s", who=str(self._log),
                           code="reader-not-started", fix="see what they say there, or write --readers 0")
        try:
            async with within(START_SECONDS, lambda: late):
                await asyncio.gather(*(process.up for process in self._all))
        except Failed as error:
            late.got = str(error)
            raise late from error

    async def pieces(self, call: Call, client: Client) -> list[Answer]:
        """What a call is answered, once all of it has come. Cancelling it ends the call.

        Args:
            client: of the call's address.

        Raises:
            Failed, EngineError: as the client's own calls do; Failed also where the reader ended.
        """
        if self._all:
            return await self._ask(call, client)
        if call.streams:
            return [piece async for piece in client.stream(call.body)]
        return [await client.generate(call.body)]

    async def close(self) -> None:
        """End them; calls that wait fail."""
        await asyncio.gather(*(process.close() for process in self._all))

    async def _ask(self, call: Call, client: Client) -> list[Answer]:
        process = min(self._all, key=lambda each: len(each.calls))
        key, answer = next(self._keys), asyncio.get_running_loop().create_future()
        client.waiting.add(answer)
        try:
            process.send(key, call, answer)
            return await answer
        except OSError as error:
            raise Failed(f"{process.name} cannot be asked: {error}") from error
        finally:
            client.waiting.discard(answer)
            process.forget(key)


class _Process:
    """One of them, and the calls that it has."""

    def __init__(self, name: str, readers: Readers):
        self.name, self._readers = name, readers
        self.calls: dict[int, asyncio.Future] = {}
        self.up: asyncio.Future | None = None
        self._popen: subprocess.Popen | None = None
        self._channel: Channel | None = None

    def start(self) -> None:
        ours, theirs = pair()
        self._readers._log.parent.mkdir(parents=True, exist_ok=True)
        with theirs, open(self._readers._log, "ab") as log:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(theirs.fileno())], pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
        self.up = self.calls[0] = asyncio.get_running_loop().create_future()
        self._channel = Channel(ours, self._told, self._lost)
        self._channel.send(0, self._readers._tokenizer)

    def send(self, key: int, call: Call, answer: asyncio.Future) -> None:
        if self._channel is None:
            self.start()
        self.calls[key] = answer
        self._channel.send(key, call)

    def forget(self, key: int) -> None:
        """A call that is no longer waited for."""
        if self.calls.pop(key, None) is not None and self._channel is not None:
            self._channel.send(key, None)

    async def close(self) -> None:
        if self._popen is not None:
            if self._channel is not None:
                self._channel.close()
            await asyncio.to_thread(_ended, self._popen)
        self._fail("the run ends")

    def _told(self, key: int, message: object) -> None:
        answer = self.calls.pop(key, None)
        if answer is None or answer.done():
            return
        if isinstance(message, OSError):
            answer.set_exception(Failed(f"an answer of {self.name} did not arrive: {message}"))
        elif isinstance(message, BaseException):
            answer.set_exception(message)
        else:
            answer.set_result(message)

    def _lost(self) -> None:
        self._channel = None
        why = f"it ended with code {_ended(self._popen)}"
        self._readers._event("reader_lost", reader=self.name, why=why,
                             text=f"{self.name} is lost and is started again: {why}")
        self._fail(why)

    def _fail(self, why: str) -> None:
        calls, self.calls = self.calls, {}
        for answer in calls.values():
            if not answer.done():
                answer.set_exception(Failed(f"{self.name}: {why}"))
                answer.exception()  # nobody may wait for a reader to come up


def backend(tokenizer: Any) -> Any:
    """What decodes exactly as transformers' tokenizer does, without transformers; None where nothing is known to."""
    kind = type(tokenizer)
    plain = (getattr(kind, "decode", None), getattr(kind, "_decode", None))
    names = [getattr(method, "__qualname__", "") for method in plain]
    if names == ["PreTrainedTokenizerBase.decode", "TokenizersBackend._decode"] and not (
            tokenizer.clean_up_tokenization_spaces):
        return tokenizer.backend_tokenizer
    return None


def _ended(process: subprocess.Popen) -> int:
    """Its exit code; its end of the socket is closed, so it ends by itself."""
    try:
        return process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
