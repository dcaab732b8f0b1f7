"""A small server that speaks SGLang's wire format as it was recorded from 0.5.16, and routers of both protocols.

Its tokens are a function of those before them, so an exact continuation can be told from any other. As a program, with
the flags of `sglang.launch_server`, it is a server of its own, which dies of a prompt that begins with DIES, is
killed at one that begins with IS_KILLED, and does not start once where there is a file --fails.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import signal
import traceback
from pathlib import Path

import numpy as np
from aiohttp import web

LAYERS, TOPK, VOCAB = 2, 2, 100
DIES, IS_KILLED = 97, 96


def next_token(ids: list[int]) -> int:
    """The token after these; never 98 (end of sequence) or 99."""
    return (sum((i + 1) * token for i, token in enumerate(ids[-7:])) + len(ids)) % 98


def log_prob(ids: list[int], token: int) -> float:
    """Exact in float32."""
    return -(1 + (token + len(ids)) % 64) / 64


class Wire:
    """The server. `step` is the seconds of a token; `plan` answers the next requests: a status, "reset" or a dict that
    replaces parts of meta_info. Without `alive` it hangs: connections stay, and nothing comes. `stuck` is a path that
    does."""

    def __init__(self, step: float = 0.002):
        self.step, self.version, self.plan, self.paused = step, "default", [], asyncio.Event()
        self.paused.set()
        self.requests: list[dict] = []
        self.calls: list[tuple[str, dict]] = []
        self.running: dict[str, bool] = {}
        self.loader = ["miles_weights.load"]
        self.alive, self.held, self.stuck, self.drawn = True, False, "", 0

    async def __aenter__(self, port: int = 0) -> Wire:
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.abort)
        for path in ("pause_generation", "continue_generation", "flush_cache", "release_memory_occupation",
                     "resume_memory_occupation", "set_version"):
            app.router.add_post(f"/{path}", self.control)
        for path in ("model_info", "server_info", "health"):
            app.router.add_get(f"/{path}", self.info)
        self.url, self._runner = await serve(app, port)
        return self

    async def __aexit__(self, *error: object) -> None:
        self.alive = True
        await self._runner.cleanup()

    async def draws(self, tokens: int) -> None:
        """Wait until it has drawn so many more."""
        end = self.drawn + tokens
        async with asyncio.timeout(20):
            while self.drawn < end:
                await asyncio.sleep(0.001)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        planned = self.plan.pop(0) if self.plan else {}
        if isinstance(planned, int):
            return web.json_response({"error": {"message": f"planned {planned}"}}, status=planned)
        if planned == "reset":
            request.transport.abort()
            return web.Response()
        if not body.get("stream"):
            return web.json_response([answer async for answer in self.draw(body, planned)][-1])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async for answer in self.draw(body, planned):
            await response.write(b"data: " + json.dumps(answer).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def draw(self, body: dict, planned: dict):
        ids, params, drawn, reason = list(body["input_ids"]), body["sampling_params"], [], None
        self.running[body["rid"]] = True
        while reason is None:
            await asyncio.sleep(self.step)
            while not (self.paused.is_set() and self.alive):
                await asyncio.sleep(0.005)
            token = next_token(ids)
            drawn.append([log_prob(ids, token), token, None])
            ids.append(token)
            self.drawn += 1
            if not self.running[body["rid"]]:
                reason = {"type": "abort", "message": "Aborted"}
            elif token in params["stop_token_ids"]:
                reason = {"type": "stop", "matched": token}
            elif len(drawn) >= params["max_new_tokens"]:
                reason = {"type": "length", "length": len(drawn)}
            yield self.answer(body, drawn, reason, planned)
        del self.running[body["rid"]]

    def answer(self, body: dict, drawn: list, reason: dict | None, planned: dict) -> dict:
        ids = [*body["input_ids"], *(token for _, token, _ in drawn)]
        meta = {
            "id": body["rid"], "finish_reason": reason, "prompt_tokens": len(body["input_ids"]),
            "weight_version": self.version, "num_retractions": 0, "input_token_logprobs": [],
            "output_token_logprobs": list(drawn), "output_token_logprobs_length": len(drawn),
            "completion_tokens": len(drawn), "cached_tokens": 2, "e2e_latency": 0.1,
        }  # fmt: skip
        if body.get("return_routed_experts"):
            rows = np.array(ids[:-1], np.int32)[body["routed_experts_start_len"]:]
            meta["routed_experts"] = base64.b64encode(np.repeat(rows, LAYERS * TOPK).tobytes()).decode()
        return {"text": "ignored", "output_ids": [token for _, token, _ in drawn], "meta_info": meta | planned}

    async def abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append(("abort", body))
        for rid in self.running:
            if body.get("abort_all") or rid.startswith(body.get("rid") or "?"):
                self.running[rid] = False
        return web.Response()

    async def control(self, request: web.Request) -> web.Response:
        body, name = await request.json(), request.path[1:]
        self.calls.append((name, body))
        while self.stuck == name:
            await asyncio.sleep(0.05)
        if name in ("pause_generation", "continue_generation"):
            self.held = name == "pause_generation"
        if name == "pause_generation" and body["mode"] == "in_place":
            self.paused.clear()
        if name == "continue_generation":
            self.paused.set()
        if name == "set_version":
            self.version = body["version"]
        if name == "flush_cache" and self.running:
            return web.Response(status=400, text="Flush cache failed.\n")
        return web.json_response({"success": True})

    async def info(self, request: web.Request) -> web.Response:
        while not self.alive:
            await asyncio.sleep(0.005)
        return web.json_response({"weight_version": self.version, "custom_weight_loader": self.loader,
                                  "tp_size": 1, "max_req_input_len": 195})


class MortalWire(Wire):
    """The same, which ends as SGLang's server does after an exception in its scheduler."""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        first = (await request.json())["input_ids"][0]
        if first == DIES:
            try:
                raise RuntimeError("no kernel for this prompt")
            except RuntimeError:
                print(f"Scheduler hit an exception: {traceback.format_exc()}\nSIGQUIT received.", flush=True)
        if first in (DIES, IS_KILLED):
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().generate(request)


class WireRouter:
    """A router of one protocol: "new" has /workers, "old" has /add_worker, /remove_worker and /list_workers.

    Like a real one it takes a worker later than it says, and once the worker draws tokens if it is one of `servers`."""

    def __init__(self, protocol: str, servers: tuple[Wire, ...] = ()):
        self.protocol, self.workers, self.servers = protocol, {}, servers

    async def __aenter__(self) -> WireRouter:
        app = web.Application()
        if self.protocol == "new":
            app.router.add_get("/workers", self.listed)
            app.router.add_post("/workers", self.added)
            app.router.add_delete("/workers/{id}", self.removed)
        else:
            app.router.add_get("/list_workers", self.listed)
            app.router.add_post("/add_worker", self.added)
            app.router.add_post("/remove_worker", self.removed)
        self.url, self._runner = await serve(app)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._runner.cleanup()

    async def listed(self, request: web.Request) -> web.Response:
        if self.protocol == "old":
            return web.json_response({"urls": list(self.workers.values())})
        return web.json_response({"workers": [{"id": key, "url": url} for key, url in self.workers.items()]})

    async def added(self, request: web.Request) -> web.Response:
        url = request.query["url"] if self.protocol == "old" else (await request.json())["url"]
        self.taking = asyncio.ensure_future(self.take(url))
        return web.json_response({"status": "accepted"}, status=202)

    async def take(self, url: str) -> None:
        await asyncio.sleep(0.05)
        while any(server.url == url and server.held for server in self.servers):
            await asyncio.sleep(0.005)
        self.workers[f"id-{len(self.workers)}"] = url

    async def removed(self, request: web.Request) -> web.Response:
        keys = [request.match_info["id"]] if self.protocol == "new" else [
            key for key, url in self.workers.items() if url == request.query["url"]]
        asyncio.get_running_loop().call_later(0.05, lambda: [self.workers.pop(key) for key in keys])
        return web.json_response({"status": "accepted"}, status=202)


async def serve(app: web.Application, port: int = 0) -> tuple[str, web.AppRunner]:
    """Its URL, and what ends it."""
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}", runner


async def forever(port: int) -> None:
    await MortalWire().__aenter__(port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    flags = argparse.ArgumentParser()
    flags.add_argument("--port", type=int)
    flags.add_argument("--fails", type=Path)
    parsed = flags.parse_known_args()[0]
    if parsed.fails is not None and parsed.fails.exists():
        parsed.fails.unlink()
        raise RuntimeError("the memory is not free yet")
    asyncio.run(forever(parsed.port))
