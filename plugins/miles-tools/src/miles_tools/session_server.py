"""The endpoint: sessions over HTTP on the loopback interface, in the form of OpenAI's chat completions.

    GET  /health                 whether it serves; needs no token
    GET  /v1/models              the one model there is
    POST /v1/chat/completions    the next answer of the session whose token the request bears
    POST /sessions/TOKEN/v1/...  the same, for clients that send a token of their own

A token is the session's alone and stops working when it ends. Requests whose Host is not this address are refused: a
page in a browser can reach loopback addresses under a name of its own.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

from aiohttp import web

from miles_tools.session import Completion, Session
from miles_tools.session_request import Asked, Refused, parse

MODEL = "miles"
LARGEST = 2**24
"""Bytes of a request."""
PATIENCE = 30.0
"""Seconds that a client may take to send its first request's head, a request's body, and to take its answer."""
_SESSION = re.compile(r"^/sessions/([\w.]+)(?=/)")
IDLE = 75.0
"""Seconds that a connection may stay open between two requests, half a head included."""
LOG = logging.getLogger(__name__)
LOG.addHandler(logging.NullHandler())  # what an agent sends that is no HTTP is not the run's to print


class SessionServer:
    """One listener for all sessions of a run; `open` gives a session's key, and `close` ends it."""

    def __init__(self) -> None:
        self._sessions: dict[str, tuple[bytes, Session]] = {}
        self._calls: dict[Session, set[asyncio.Task[Any]]] = {}
        self._server: web.Server | None = None
        self._listener: asyncio.Server | None = None
        self._starting = asyncio.Lock()
        self._waiting: dict[web.RequestHandler, asyncio.TimerHandle] = {}
        self.port = 0

    @property
    def base_url(self) -> str:
        """What an OpenAI client calls base_url."""
        return f"http://127.0.0.1:{self.port}/v1"

    def session_url(self, key: str) -> str:
        """The address of one session, without /v1, that needs no further token."""
        return f"http://127.0.0.1:{self.port}/sessions/{key}"

    async def start(self) -> None:
        """Listen on a free port of 127.0.0.1; a second call does nothing."""
        async with self._starting:
            if self._listener is None:
                loop = asyncio.get_running_loop()
                # A call whose client has gone is cancelled; what it asked for was not delivered, and it may ask again.
                self._server = web.Server(self._handle, handler_cancellation=True, access_log=None, logger=LOG,
                                          keepalive_timeout=IDLE)
                self._listener = await loop.create_server(partial(self._connect, self._server), "127.0.0.1", 0)
                self.port = self._listener.sockets[0].getsockname()[1]

    def open(self, session: Session) -> str:
        """The key with which requests reach this session."""
        name, secret = secrets.token_hex(8), secrets.token_hex(32)
        self._sessions[name] = secret.encode(), session
        self._calls[session] = set()
        return f"{name}.{secret}"

    async def close(self, key: str) -> None:
        """End a session: its key stops working, and a call under way is cancelled."""
        _, session = self._sessions.pop(key.partition(".")[0])
        calls = self._calls.pop(session)
        for call in calls:
            call.cancel()
        if calls:
            await asyncio.wait(calls, timeout=PATIENCE)

    def stop(self) -> None:
        """End all: no new connection, none of the old ones."""
        if self._listener is not None and self._server is not None:
            self._listener.close()
            for connection in list(self._server.connections):
                connection.force_close()
            for timer in self._waiting.values():
                timer.cancel()
            self._waiting.clear()
            self._listener = self._server = None
            self._sessions.clear()

    def _connect(self, server: web.Server) -> web.RequestHandler:
        """A connection that is closed unless the head of a request comes in time; aiohttp waits for ever."""
        connection = server()
        self._waiting[connection] = asyncio.get_running_loop().call_later(PATIENCE, self._give_up, connection)
        return connection

    def _give_up(self, connection: web.RequestHandler) -> None:
        del self._waiting[connection]
        connection.force_close()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.protocol in self._waiting:
            self._waiting.pop(request.protocol).cancel()
        try:
            return await self._route(request)
        except Refused as refused:
            return _refusal(refused)
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception as error:  # noqa: BLE001 - the session keeps it, and it ends the run
            return _refusal(Refused(500, f"the run failed: {error}", "server_error"))

    async def _route(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.host not in (f"127.0.0.1:{self.port}", f"localhost:{self.port}"):
            raise Refused(403, f"requests have to be addressed to 127.0.0.1:{self.port}", "forbidden")
        handlers: dict[str, tuple[str, Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]]] = {
            "/health": ("GET", self._health), "/v1/models": ("GET", self._models),
            "/v1/chat/completions": ("POST", self._complete)}
        path = _SESSION.sub("", request.path)
        if path not in handlers:
            raise Refused(404, f"no such path {path}; known: {', '.join(handlers)}", "not_found")
        method, handler = handlers[path]
        if request.method != method:
            raise Refused(405, f"{request.path} takes {method}", "method_not_allowed")
        return await handler(request)

    async def _health(self, _request: web.BaseRequest) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.BaseRequest) -> web.Response:
        self._session(request)
        return web.json_response({"object": "list", "data": [
            {"id": MODEL, "object": "model", "created": 0, "owned_by": MODEL}]})

    async def _complete(self, request: web.BaseRequest) -> web.StreamResponse:
        session = self._session(request)
        chat = parse(await _body(request), session.sampling)
        self._session(request)  # it may have ended meanwhile
        calls, call = self._calls[session], asyncio.ensure_future(session.complete(chat))
        calls.add(call)
        try:
            completion = await call
        finally:
            call.cancel()
            calls.discard(call)
        headers = {"x-miles-ignored": ", ".join(chat.ignored)} if chat.ignored else {}
        if not chat.stream:
            return web.json_response(_whole(completion), headers=headers)
        return await _stream(request, completion, chat, headers)

    def _session(self, request: web.BaseRequest) -> Session:
        """
        Raises:
            Refused: 401, no token, or none of a session under way.
        """
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if in_path := _SESSION.match(request.path):
            scheme, key = "bearer", in_path[1]
        name, _, secret = key.strip().partition(".")
        expected, session = self._sessions.get(name, (b"", None))
        matches = hmac.compare_digest(expected, secret.encode(errors="replace"))
        if scheme.lower() != "bearer" or not matches or not session:
            raise Refused(401, "the token is missing or of no session under way; send the session's key as "
                               "Authorization: Bearer KEY", "invalid_api_key")
        return session


async def _body(request: web.BaseRequest) -> bytes:
    """
    Raises:
        Refused: 413, more than LARGEST bytes; 408, not there within PATIENCE seconds.
    """
    data = bytearray()
    try:
        async with asyncio.timeout(PATIENCE):
            async for piece in request.content.iter_any():
                data += piece
                if len(data) > LARGEST:
                    raise Refused(413, f"a request may have at most {LARGEST} bytes", "request_too_large")
    except TimeoutError:
        raise Refused(408, f"the request did not arrive within {PATIENCE:g} s", "timeout") from None
    return bytes(data)


def _refusal(refused: Refused) -> web.Response:
    """OpenAI's form of an error. Their clients try some statuses again unless they are told not to."""
    body = {"error": {"message": refused.sentence, "type": refused.code, "code": refused.code, "param": None}}
    response = web.json_response(body, status=refused.status, headers={
        "x-should-retry": "true" if refused.again else "false"})
    if refused.status in (401, 403, 408, 413):
        response.force_close()  # whatever else is on its way here is not read
    return response


def _whole(completion: Completion) -> dict[str, Any]:
    """OpenAI's object of an answer."""
    return {**_head(completion, "chat.completion"), "usage": _usage(completion), "choices": [
        {"index": 0, "message": _shown(completion), "logprobs": None, "finish_reason": completion.finish_reason}]}


def _head(completion: Completion, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{completion.turn}", "object": kind, "created": int(time.time()), "model": MODEL}


def _shown(completion: Completion) -> dict[str, Any]:
    message = completion.message
    return {**message, "content": message["content"] or (None if "tool_calls" in message else "")}


def _usage(completion: Completion) -> dict[str, int]:
    return {"prompt_tokens": completion.prompt_tokens, "completion_tokens": completion.completion_tokens,
            "total_tokens": completion.prompt_tokens + completion.completion_tokens}


def _pieces(completion: Completion, chat: Asked) -> Iterator[dict[str, Any]]:
    """An answer as the events of a stream: the message, its end, and how many tokens it has."""
    head, message = _head(completion, "chat.completion.chunk"), _shown(completion)
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    for delta, reason in ((message, None), ({}, completion.finish_reason)):
        yield {**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]}
    if chat.include_usage:
        yield {**head, "choices": [], "usage": _usage(completion)}


async def _stream(request: web.BaseRequest, completion: Completion, chat: Asked,
                  headers: dict[str, Any]) -> web.StreamResponse:
    response = web.StreamResponse(headers={**headers, "Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    async with asyncio.timeout(PATIENCE):
        await response.prepare(request)
        for piece in _pieces(completion, chat):
            await response.write(f"data: {json.dumps(piece)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
    return response
