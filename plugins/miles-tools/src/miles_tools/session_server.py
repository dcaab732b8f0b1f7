"""The endpoint: sessions over HTTP on the loopback interface, in the form of OpenAI's and Anthropic's services.

    GET  /health                    whether it serves; needs no token
    GET  /v1/models                 the one model there is
    POST /v1/chat/completions       the next answer of the session whose token the request bears
    POST /v1/responses              the same in the form of OpenAI's responses
    POST /v1/messages               the same in Anthropic's form
    POST /v1/messages/count_tokens  how many tokens its messages have
    POST /sessions/TOKEN/v1/...     the same, for clients that send a token of their own

A token is the session's alone and stops working when it ends. Requests whose Host is not this address are refused: a
page in a browser can reach loopback addresses under a name of its own.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from types import ModuleType
from typing import Any

from aiohttp import web

from miles_tools import anthropic_messages, openai_chat, openai_responses
from miles_tools.session import Session
from miles_tools.session_request import MODEL, Refused

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
            return _refusal(refused, _protocol(request))
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception as error:  # noqa: BLE001 - the session keeps it, and it ends the run
            return _refusal(Refused(500, f"the run failed: {error}", "server_error"), _protocol(request))

    async def _route(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.host not in (f"127.0.0.1:{self.port}", f"localhost:{self.port}"):
            raise Refused(403, f"requests have to be addressed to 127.0.0.1:{self.port}", "forbidden")
        handlers: dict[str, tuple[str, Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]]] = {
            "/health": ("GET", self._health), "/v1/models": ("GET", self._models),
            "/v1/chat/completions": ("POST", self._complete), "/v1/responses": ("POST", self._complete),
            "/v1/messages": ("POST", self._complete), "/v1/messages/count_tokens": ("POST", self._count)}
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

    async def _count(self, request: web.BaseRequest) -> web.Response:
        session = self._session(request)
        chat = anthropic_messages.parse(await _body(request), session.sampling)
        return web.json_response({"input_tokens": session.count(chat)})

    async def _complete(self, request: web.BaseRequest) -> web.StreamResponse:
        session, protocol = self._session(request), _protocol(request)
        chat = protocol.parse(await _body(request), session.sampling)
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
            return web.json_response(protocol.whole(completion, chat), headers=headers)
        return await _stream(request, protocol.events(completion, chat), headers)

    def _session(self, request: web.BaseRequest) -> Session:
        """
        Raises:
            Refused: 401, no token, or none of a session under way.
        """
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if "x-api-key" in request.headers:
            scheme, key = "bearer", request.headers["x-api-key"]
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


def _protocol(request: web.BaseRequest) -> ModuleType:
    """By whose form a request is read and answered."""
    if "/v1/messages" in request.path:
        return anthropic_messages
    return openai_responses if "/v1/responses" in request.path else openai_chat


def _refusal(refused: Refused, protocol: ModuleType) -> web.Response:
    """Clients of both protocols try some statuses again unless they are told not to."""
    response = web.json_response(protocol.refusal(refused), status=refused.status, headers={
        "x-should-retry": "true" if refused.again else "false"})
    if refused.status in (401, 403, 408, 413):
        response.force_close()  # whatever else is on its way here is not read
    return response


async def _stream(request: web.BaseRequest, events: Iterable[str], headers: dict[str, Any]) -> web.StreamResponse:
    response = web.StreamResponse(headers={**headers, "Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    async with asyncio.timeout(PATIENCE):
        await response.prepare(request)
        for event in events:
            await response.write(event.encode())
        await response.write_eof()
    return response
