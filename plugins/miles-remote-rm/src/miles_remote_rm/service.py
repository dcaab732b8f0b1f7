"""Service: a JSON document over HTTP, a JSON document back. Every wait is bounded, and a failure is an error.

What says nothing about the request itself is tried again with a growing pause: a connection that fails or breaks, and
the answers 502, 503 and 504 of a proxy. Anything else that is no reward ends in a RewardError that names the address,
the sample, the status and how the answer begins.
"""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import dataclass
from typing import Any, TypeGuard

import aiohttp
from yarl import URL

from miles_core.errors import RewardError
from miles_core.waits import within

AGAIN = (502, 503, 504)
"""Statuses with which a proxy reports that it reached no server."""
PAUSE, LONGEST_PAUSE = 0.25, 8.0
"""Seconds before the second attempt; twice as many before each further one, up to the longest."""
LARGEST = 2**20
"""Bytes of an answer; a reward needs a few."""
SHOWN = 200
"""Bytes of an answer that an error shows."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a service said: a parsed document, and what an error has to name when it is no reward."""

    value: object
    url: str
    name: str
    status: int
    begins: str

    def useless(self, why: str) -> RewardError:
        """The error for an answer that holds no reward."""
        return RewardError(f"the reward service's answer for {self.name} {why}", who=self.url,
                           got=f"HTTP {self.status}: {self.begins}", code="reward-service-answer-invalid",
                           fix="fix the service; a failure is not a reward of 0")


class Service:
    """One address.

    Args:
        url: where documents are posted to.
        timeout: seconds for one document, waiting for its turn and all attempts included.
        connect_timeout: seconds for one connection.
        concurrency: requests that are under way at once.
        retries: further attempts where another may fare better.
    """

    def __init__(self, url: str, *, timeout: float, connect_timeout: float, concurrency: int, retries: int):
        self._url, self._shown = url, str(URL(url).with_user(None))  # what errors show holds no password
        self._timeout, self._connect_timeout, self._retries = timeout, connect_timeout, retries
        self._turns = asyncio.Semaphore(concurrency)
        self._session: aiohttp.ClientSession | None = None
        self._closing: asyncio.Task[Any] | None = None

    async def ask(self, document: dict[str, Any], name: str) -> Answer:
        """Post one document.

        Args:
            name: whom it is about, for errors.

        Raises:
            RewardError: no answer in time, a refusal, no JSON, or more than LARGEST bytes.
        """
        last = "no turn yet: others are being asked"

        def late() -> RewardError:
            return RewardError(f"the reward service returned no reward for {name} within {self._timeout:g} s",
                               who=self._shown, code="reward-service-timeout",
                               got=last, fix="look at its log, or raise --rm-timeout")

        async with within(self._timeout, late), self._turns:
            for attempt in range(self._retries + 1):
                if attempt:
                    await asyncio.sleep(min(PAUSE * 2 ** (attempt - 1), LONGEST_PAUSE))
                last = f"no answer to attempt {attempt + 1}"
                try:
                    status, body = await self._post(document)
                except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
                    last = f"{type(error).__name__}: {error}"
                    continue
                except aiohttp.ClientError as error:
                    raise RewardError(f"the answer for {name} is not HTTP", who=self._shown,
                                      got=f"{type(error).__name__}: {error}"[:SHOWN], code="reward-service-not-http",
                                      fix="correct the address, or fix the service") from None
                last = f"HTTP {status}: {_beginning(body)}"
                if status not in AGAIN:
                    return self._read(status, body, name)
        raise RewardError(f"the reward service returned no reward for {name} in {self._retries + 1} attempts",
                          who=self._shown, code="reward-service-retries-exhausted",
                          got=last, fix="look at its log")

    def close(self) -> None:
        """Close the connections; those of a loop that has ended are closed already."""
        session, self._session = self._session, None
        if session is not None:
            try:
                # The first step of the task closes them, and it runs even if the loop ends right after this.
                self._closing = asyncio.get_running_loop().create_task(session.close())
            except RuntimeError:
                return

    async def _post(self, document: dict[str, Any]) -> tuple[int, bytes]:
        if self._session is None:
            bounds = aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout)
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=bounds)
        async with self._session.post(self._url, json=document, allow_redirects=False) as response:
            body = bytearray()
            async for data in response.content.iter_chunked(2**16):
                body += data
                if len(body) > LARGEST:
                    break  # leaving the block closes the connection, for its answer was not read to the end
            return response.status, bytes(body)

    def _read(self, status: int, body: bytes, name: str) -> Answer:
        def answer(value: object) -> Answer:
            return Answer(value, self._shown, name, status, _beginning(body))

        if not 200 <= status < 300:
            raise answer(None).useless("is a refusal")
        if len(body) > LARGEST:
            raise answer(None).useless(f"has more than {LARGEST} bytes")
        try:
            return answer(json.loads(body))
        except (ValueError, RecursionError):
            raise answer(None).useless("is not JSON") from None


def number(answer: Answer, key: str | None = None) -> float:
    """The reward in an answer for one sample: a number, or the number under `key`, "reward" or "score".

    Raises:
        RewardError: no reward, or one that is not finite.
    """
    value = _under(answer.value, *([key] if key else []), "reward", "score")
    if not _is_number(value):
        raise answer.useless("holds no number")
    if not math.isfinite(value):
        raise answer.useless("holds a number that is not finite")
    return float(value)


def numbers(answer: Answer, count: int) -> list[float]:
    """The rewards in an answer for a group: a list of numbers, or the list under "rewards" or "scores".

    Raises:
        RewardError: it has not one finite number for each of `count` samples.
    """
    values = _under(answer.value, "rewards", "scores")
    if not isinstance(values, list) or len(values) != count:
        raise answer.useless(f"is no list of {count} numbers")
    if not all(_is_number(value) and math.isfinite(value) for value in values):
        raise answer.useless("holds something else than finite numbers")
    return [float(value) for value in values]


def _under(value: object, *keys: str) -> object:
    if isinstance(value, dict):
        return next((value[key] for key in keys if key in value), None)
    return value


def _is_number(value: object) -> TypeGuard[int | float]:
    """JSON's numbers; true and false are none, nor is an integer that no float holds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return float(value) is not None
    except OverflowError:
        return False


def _beginning(body: bytes) -> str:
    text = body[:SHOWN].decode(errors="replace").strip()
    return (text or "an empty body") + ("..." if len(body) > SHOWN else "")
