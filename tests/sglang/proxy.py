"""A proxy in front of a real SGLang server that does to requests what networks and dying processes do."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import aiohttp
from aiohttp import web


class Proxy:
    """Hands everything on, but for what `fault` says.

    Args:
        target: http://HOST:PORT of the server.

    `fault(path, kind, times)` lets the next `times` requests for a path meet: "delay" (a second late), "drop" (it is
    taken and nothing ever comes back), "500", "truncated" (half of the answer's body), "wrong version" (the answer's
    weight_version is another), "garbage" (its token ids are beyond any vocabulary), "reset" (the connection breaks),
    "late 500" (the server does it, and the answer is 500).
    `seen` counts requests by path, `bodies` keeps those of /generate.
    """

    def __init__(self, target: str):
        self.target, self.seen, self.bodies = target, Counter(), []
        self._faults: dict[str, tuple[str, int]] = {}

    def fault(self, path: str, kind: str, times: int = 1) -> None:
        """What the next requests for this path meet."""
        self._faults[path] = (kind, times)

    async def __aenter__(self) -> Proxy:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{tail:.*}", self._pass)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.address = f"127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.seen[request.path] += 1
        if request.path == "/generate":
            self.bodies.append(json.loads(body))
        kind, left = self._faults.get(request.path, ("", 0))
        if left:
            self._faults[request.path] = (kind, left - 1)
        else:
            kind = ""
        if kind == "delay":
            await asyncio.sleep(1.0)
        elif kind == "drop":
            await asyncio.sleep(3600.0)
        elif kind == "500":
            return web.Response(status=500, text="the proxy says so")
        elif kind == "reset":
            request.transport.abort()
            return web.Response()
        async with self._session.request(request.method, self.target + request.path_qs, data=body,
                                         headers={"Content-Type": "application/json"}) as answer:
            data = await answer.read()
        if kind == "late 500":
            return web.Response(status=500, text="the proxy says so, after the fact")
        if kind in ("wrong version", "garbage"):
            data = _spoilt(kind, data)
        if kind == "truncated":
            response = web.StreamResponse(headers={"Content-Length": str(len(data))})
            await response.prepare(request)
            await response.write(data[: len(data) // 2])
            request.transport.close()
            return response
        return web.Response(status=answer.status, body=data, content_type=answer.content_type)


def _spoilt(kind: str, data: bytes) -> bytes:
    """An answer of /generate that is well made and wrong."""
    changed = json.loads(data)
    if kind == "wrong version":
        changed["meta_info"]["weight_version"] = "77"
    else:
        for one in changed["meta_info"]["output_token_logprobs"]:
            one[1] += 100_000
        changed["output_ids"] = [token + 100_000 for token in changed["output_ids"]]
    return json.dumps(changed).encode()
