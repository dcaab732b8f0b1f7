"""Client: what Miles asks of one vLLM server, and how its answers are read.

Requests and answers are token ids, at /inference/v1/generate. `Failed` says that nothing of a call was delivered and it
may be sent again; an EngineError, that another try would not help.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np

from miles_core.errors import EngineError

CONNECT_TIMEOUT = 10.0
"""Seconds for a connection; servers and driver are neighbours."""
RETRIED = (408, 429, 500, 502, 503, 504)
"""Statuses that say nothing about the request itself."""
PREFIX = "generate-tokens-"
"""What vLLM puts before the id of a request, and expects to be told when it is to abort one."""
UNTRAINED = "default"
"""The version that a server names until it is given another."""


class Failed(Exception):
    """A call that was not answered and may be sent again, whole."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one call drew; N tokens.

    Args:
        ids: [N] int32.
        log_probs: [N] float32.
        versions: [N] int32, the version that the server had when it drew each.
        reason: "stop", "length" or "abort".
    """

    ids: np.ndarray
    log_probs: np.ndarray
    versions: np.ndarray
    reason: str


class Client:
    """One server.

    Args:
        url: http://HOST:PORT.
        name: how errors call it, such as "engine 0".
    """

    def __init__(self, url: str, name: str):
        self.url, self.name = url, name
        self._session: aiohttp.ClientSession | None = None

    async def generate(self, body: dict[str, Any]) -> Answer:
        """One request, answered as a whole. How long that may take is the caller's to bound.

        Raises:
            Failed: nothing came, or nothing that can be read.
            EngineError: the server refuses the request.
        """
        return parse(await self._exchange("POST", "/inference/v1/generate", body, None), self.name)

    async def abort(self, names: list[str]) -> None:
        """End these requests; their own calls return with what was drawn until then."""
        await self.call("/abort_requests", {"request_ids": [PREFIX + name for name in names]}, timeout=30)

    async def pause(self, mode: str, timeout: float) -> None:
        """Draw no further token. "abort" ends what runs and forgets all cached prefixes, "keep" keeps both."""
        await self.call(f"/pause?mode={mode}", {}, timeout=timeout)

    async def resume(self, timeout: float = 30) -> None:
        """Go on after `pause`; does nothing otherwise."""
        await self.call("/resume", {}, timeout=min(30, timeout))

    async def load(self, folder: str, timeout: float) -> str | None:
        """Have every worker load a version's files; why one could not, or None."""
        body = {"method": "miles_load", "args": [folder], "timeout": timeout}
        results = (await self.call("/collective_rpc", body, timeout=timeout)).get("results")
        if not results or not isinstance(results, list) or not all("error" in (one or ()) for one in results):
            return f"it did not say what it loaded, but {str(results)[:200]}"
        return next((str(one["error"]) for one in results if one["error"]), None)

    async def set_version(self, version: int) -> None:
        """What the server is to say of its weights from now on."""
        await self.call("/update_weight_version", {"new_version": str(version)}, timeout=30)

    async def version(self, timeout: float | None = 30) -> str:
        """What it says of its weights. Its engine answers between two steps, so it is alive."""
        return str((await self.call("/weight_info", timeout=timeout)).get("weight_version"))

    async def healthy(self, timeout: float | None) -> None:
        """The server is up, though its engine may be busy."""
        await self.call("/health", timeout=timeout)

    async def call(self, path: str, body: dict[str, Any] | None = None, *, timeout: float | None) -> dict[str, Any]:
        """A control call: GET without a body, else POST. Returns the JSON answer, {} if there is none.

        Raises:
            EngineError: refused, failed, or not answered within `timeout` seconds (None: whenever); names the server
                and the path.
        """
        try:
            answer = await self._exchange("GET" if body is None else "POST", path, body, timeout)
        except Failed as error:
            raise EngineError(f"{path} failed", got=str(error), who=f"{self.name} at {self.url}", fix="see its log",
                              code="server-request-failed") from error
        return answer if isinstance(answer, dict) else {}

    async def reset(self) -> None:
        """Drop all connections; calls that wait for an answer end with Failed. The next call reconnects."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _exchange(self, method: str, path: str, body: dict[str, Any] | None, timeout: float | None) -> Any:
        """The answer's JSON, None where there is none."""
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
        bound = aiohttp.ClientTimeout(total=timeout, sock_connect=CONNECT_TIMEOUT)
        try:
            async with self._session.request(method, self.url + path, json=body, timeout=bound) as response:
                status, data = response.status, await response.read()
        except TimeoutError as error:
            if timeout is None:
                raise Failed(f"{self.name}: no connection within {CONNECT_TIMEOUT:g} s") from error
            raise EngineError(f"no answer to {path} within {timeout:g} s", who=f"{self.name} at {self.url}",
                              fix="see its log", code="server-request-timeout") from error
        except (aiohttp.ClientError, OSError, RuntimeError) as error:  # the last where `reset` came before the reading
            raise Failed(f"{self.name}: {type(error).__name__}: {error}") from error
        if status in RETRIED:
            raise Failed(f"{self.name}: HTTP {status} from {path}: {data[:300].decode(errors='replace')}")
        if status >= 300:
            raise EngineError(f"{path} was rejected with HTTP {status}", got=data[:500].decode(errors="replace"),
                              who=f"{self.name} at {self.url}", code="server-request-rejected",
                              fix="the request does not fit this server; see its log")
        try:
            return json.loads(data) if data.strip() else None
        except ValueError as error:
            raise Failed(f"{self.name}: {path} was answered with what is no JSON: {data[:100]!r}") from error


def parse(body: Any, name: str) -> Answer:
    """An answer of /inference/v1/generate.

    Raises:
        Failed: it is not one, or lacks a token's id, log-prob or version.
    """
    try:
        [choice] = body["choices"]
        drawn = (choice["logprobs"] or {}).get("content") or []
        ids = np.array(choice["token_ids"] or [], np.int32)
        log_probs = np.array([one["logprob"] for one in drawn], np.float32)
        if [one["token_id"] for one in drawn] != ids.tolist():
            raise ValueError(f"{len(ids)} tokens, and log-probs of {len(drawn)}")
        return Answer(ids, log_probs, _versions(choice.get("weight_versions") or [], len(ids)),
                      str(choice["finish_reason"]))
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise Failed(f"{name}: an answer that cannot be used: {type(error).__name__}: {error}") from error


def _versions(spans: list[dict[str, Any]], count: int) -> np.ndarray:
    """[count] int32, of spans that follow each other and cover all tokens."""
    versions = np.zeros(count, np.int32)
    end = 0
    for span in spans:
        if span["start"] != end:
            raise ValueError(f"no weight version of token {end}")
        end = span["end"]
        versions[span["start"]:end] = 0 if span["version"] == UNTRAINED else int(span["version"])
    if end != count:
        raise ValueError(f"weight versions of {end} tokens out of {count}")
    return versions
