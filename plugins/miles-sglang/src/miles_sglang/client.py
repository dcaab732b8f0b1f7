"""Client: what Miles asks of one address that speaks SGLang's HTTP, a server or a router in front of several.

Requests carry token ids and no text. Three kinds of failure are told apart: `Failed`, after which the same call may be
sent again because nothing of it was delivered; EngineError for what a retry would not fix; and no answer in time,
an EngineError that names who was waited for.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import aiohttp
import numpy as np
import orjson

from miles_core.errors import EngineError
from miles_sglang.routes import Body, decoded

CONNECT_TIMEOUT = 10.0
"""Seconds for a connection; servers and driver are neighbours."""
KEEP_ALIVE = 2.0
"""Seconds that an idle connection is kept: less than uvicorn's 5, which would close it under a request."""
JSON = {"Content-Type": "application/json"}
RETRIED = (408, 429, 500, 502, 503, 504)
"""Statuses that say nothing about the request itself."""
SPECULATION = ("spec_num_correct_drafts", "spec_num_proposed_drafts", "spec_verify_ct")
RETRACTIONS = "num_retractions"
"""How often the server took a request's cache for others and computed it again: it counts on within one call."""


class Failed(Exception):
    """A call that was not answered and may be sent again, whole."""


@dataclass(slots=True)
class Answer:
    """One answer of /generate, or one piece of a streamed one; N new tokens.

    Args:
        ids: [N] int32.
        log_probs: [N] float32.
        reason: "stop", "length", "abort", or None for a piece that is not the last.
        version: weight version that the server says it has.
        experts: [rows x layers x topk] uint8, or int16 where that is too small or -1 is none, flat; or None.
        counts: what the server counted: prompt_tokens, cached_tokens, retractions, and of speculation its drafts.
        rid: id of the request that is answered.
        message: what the server says of an abort.
        text: of all the call's tokens, on its last piece, where a reader decoded it.
    """

    ids: np.ndarray
    log_probs: np.ndarray
    reason: str | None
    version: str
    experts: np.ndarray | None = None
    counts: dict[str, int] = field(default_factory=dict)
    rid: str = ""
    message: str = ""
    text: str | None = None


class Client:
    """One address.

    Args:
        url: http://HOST:PORT.
        name: how errors call it, such as "engine 0".

    `waiting` are answers that are awaited elsewhere, which `reset` lets fail as well.
    """

    def __init__(self, url: str, name: str):
        self.url, self.name = url.rstrip("/"), name
        self._session: aiohttp.ClientSession | None = None
        self.waiting: set[asyncio.Future] = set()

    async def generate(self, body: dict | bytes) -> Answer:
        """One request, answered as a whole; a body of bytes is JSON. How long that may take is the caller's to bound.

        Raises:
            Failed: nothing came, or nothing that can be read.
            EngineError: the server refuses the request.
        """
        try:
            answer = await self._exchange("POST", "/generate", body, timeout=None, read=_body)
        except ValueError as error:
            raise Failed(f"{self.name}: an answer that cannot be used: {_says(error)}") from error
        return parse(_read_json(answer.rest), 0, answer.routes)

    async def stream(self, body: bytes) -> AsyncIterator[Answer]:
        """A request that says "stream", piece by piece as the tokens are drawn; the last piece has a reason."""
        seen = 0
        try:
            async with self._open().post(self.url + "/generate", data=body, headers=JSON) as response:
                if response.status != 200:
                    self._refuse(response.status, await response.read(), "/generate")
                async for line in _lines(response.content):
                    if not line.startswith(b"data: {"):
                        continue
                    piece = _parsed(line[6:], seen)
                    seen += len(piece.ids)
                    yield piece
                    if piece.reason is not None:
                        return
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            raise Failed(f"{self.name}: {_says(error)}") from error
        raise Failed(f"{self.name}: the stream ended early")

    async def call(self, path: str, body: dict | None = None, *, timeout: float | None,
                   method: str | None = None) -> dict:
        """A control call: GET without a body, else POST. Returns the JSON answer, {} if there is no JSON.

        Raises:
            EngineError: refused, failed, or not answered within `timeout` seconds (None: whenever); names the server
                and the path.
        """
        method = method or ("GET" if body is None else "POST")
        try:
            data = await self._exchange(method, path, body, timeout)
            return _read_json(data) if data.lstrip()[:1] in (b"{", b"[") else {}
        except Failed as error:
            raise EngineError(f"{path} failed", got=str(error), who=f"{self.name} at {self.url}",
                              fix="see its log", code="server-request-failed") from error

    async def abort(self, rid: str | None = None) -> None:
        """End one request, or all; their own calls return with what was drawn until then."""
        await self.call("/abort_request", {"abort_all": True} if rid is None else {"rid": rid}, timeout=30)

    async def pause(self, mode: str, timeout: float) -> None:
        """Draw no further token. "abort" ends what runs and returns once it is idle; "in_place" keeps it."""
        await self.call("/pause_generation", {"mode": mode}, timeout=timeout)

    async def resume(self, timeout: float = 30) -> None:
        """Go on after `pause`; does nothing otherwise."""
        await self.call("/continue_generation", {}, timeout=min(30, timeout))

    async def flush(self, timeout: float = 30) -> None:
        """Forget all cached prefixes; only an idle server can."""
        await self.call(f"/flush_cache?timeout={timeout:g}", {}, timeout=timeout + 10)

    async def model_info(self, timeout: float | None = 30) -> dict:
        """What the server serves; "weight_version" is what it was last told."""
        return await self.call("/model_info", timeout=timeout)

    async def server_info(self, timeout: float | None = 60) -> dict:
        """The server's arguments and state; its scheduler answers between two steps, so it is alive."""
        return await self.call("/server_info", timeout=timeout)

    async def healthy(self, timeout: float) -> None:
        """The server draws a token, or has drawn one since it was asked; takes a second at least."""
        await self.call("/health", timeout=timeout)

    async def reset(self) -> None:
        """Drop all connections; calls that wait for an answer end with Failed. The next call reconnects."""
        session, self._session = self._session, None
        for answer in self.waiting:
            if not answer.done():
                answer.set_exception(Failed(f"{self.name}: the connection was dropped"))
        if session is not None:
            await session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT),
                read_bufsize=2**20,
            )  # fmt: skip
        return self._session

    async def _exchange(self, method: str, path: str, body: dict | bytes | None, timeout: float | None,
                        read: Callable[[aiohttp.ClientResponse], Awaitable[Any]] = aiohttp.ClientResponse.read) -> Any:
        """What `read` makes of the answer, by default its bytes."""
        bound = aiohttp.ClientTimeout(total=timeout, sock_connect=CONNECT_TIMEOUT)
        content: dict[str, Any] = {"data": body, "headers": JSON} if isinstance(body, bytes) else {"json": body}
        try:
            async with self._open().request(method, self.url + path, timeout=bound, **content) as response:
                if response.status < 300:
                    return await read(response)
                data = await response.read()
        except TimeoutError as error:
            if timeout is None:
                raise Failed(f"{self.name}: no connection within {CONNECT_TIMEOUT:g} s") from error
            raise EngineError(f"no answer to {path} within {timeout:g} s", who=f"{self.name} at {self.url}",
                              fix="see its log", code="server-request-timeout") from error
        except (aiohttp.ClientError, OSError, RuntimeError) as error:  # the last where `reset` came before the reading
            raise Failed(f"{self.name}: {_says(error)}") from error
        self._refuse(response.status, data, path)

    def _refuse(self, status: int, data: bytes, path: str) -> NoReturn:
        text = message_of(data)
        if status in RETRIED or "model_not_found" in data.decode(errors="replace"):  # smg's word for no worker
            raise Failed(f"{self.name}: HTTP {status} from {path}: {text}")
        raise EngineError(f"{path} was rejected with HTTP {status}", got=text, who=f"{self.name} at {self.url}",
                          fix="the request does not fit this server; see its log", code="server-request-rejected")


async def _body(response: aiohttp.ClientResponse) -> Body:
    body = Body()
    async for data in response.content.iter_any():
        body.feed(data)
    return body


def _parsed(data: bytes, seen: int) -> Answer:
    """An answer from all its bytes."""
    body = Body()
    try:
        body.feed(data)
    except ValueError as error:
        raise Failed(f"an answer that cannot be used: {_says(error)}") from error
    return parse(_read_json(body.rest), seen, body.routes)


def parse(body: Any, seen: int, routes: np.ndarray | None = None) -> Answer:
    """An answer of /generate from its JSON; `seen` tokens of the request came in earlier pieces.

    A streamed piece holds the new tokens or, without --incremental-streaming-output, all tokens so far.

    Args:
        routes: the routed experts, where they are not in `body`.

    Raises:
        Failed: parts are missing or do not fit together.
    """
    try:
        meta = body["meta_info"]
        reason = meta["finish_reason"]
        ids = np.array(body["output_ids"], np.int32)
        drawn = meta.get("output_token_logprobs") or []
        new = int(meta.get("completion_tokens", len(ids))) - seen
        if new < 0 or new and not {len(ids), len(drawn)} <= {new, new + seen}:
            if (reason or {}).get("type") != "abort":
                raise ValueError(f"{new} tokens drawn, {len(ids)} ids and {len(drawn)} log-probs")
            new = 0  # aborted in the waiting queue, the server does not know all any more: they are drawn again
        drawn, ids = drawn[len(drawn) - new:], ids[len(ids) - new:]
        if [one[1] for one in drawn] != ids.tolist():
            raise ValueError("log-probs are not those of the tokens")
        log_probs = np.array([one[0] for one in drawn], np.float32)  # None becomes NaN
        text = meta.get("routed_experts")
        return Answer(
            ids=ids, log_probs=log_probs, reason=None if reason is None else reason["type"],
            version=str(meta["weight_version"]), rid=str(meta["id"]), message=str((reason or {}).get("message", "")),
            experts=decoded(text) if text else routes,
            counts={name: int(meta[name]) for name in ("prompt_tokens", "cached_tokens", RETRACTIONS, *SPECULATION)
                    if meta.get(name) is not None},
        )  # fmt: skip
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise Failed(f"an answer that cannot be used: {_says(error)}; it begins {str(body)[:200]}") from error


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Lines of any length; aiohttp's own reader refuses long ones."""
    buffered = b""
    async for data in content.iter_any():
        *lines, buffered = (buffered + data).split(b"\n")
        for line in lines:
            yield line


def message_of(data: bytes) -> str:
    """What an error body says, without its wrapping."""
    text = data.decode(errors="replace").strip()
    try:
        detail = json.loads(text)
        while isinstance(detail, dict):
            detail = detail.get("error", detail.get("message", detail.get("detail", str(detail))))
        return str(detail)[:500]
    except ValueError:
        return text[:500] or "no text"


def _read_json(data: bytes | bytearray) -> Any:
    try:
        return orjson.loads(data)
    except ValueError:
        pass  # NaN is no JSON, and the error of who gets one says more
    try:
        return json.loads(data)
    except ValueError as error:
        raise Failed(f"an answer that is not JSON: {data[:100]!r}") from error


def _says(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
