"""A small server that speaks vLLM's wire format as it was seen from 0.32, with the arguments of vLLM's command.

Its tokens are a function of the seed, their place and the version. The first token of a prompt may ask for a fault.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from pathlib import Path

from aiohttp import web

VOCABULARY, STEP = 264, 0.001
NONSENSE, DIES, SILENT, NO_VERSIONS, REFUSES, HTML = 90, 91, 92, 93, 94, 95
"""First tokens of prompts, and what is done then."""


async def dies() -> web.Response:
    print("(EngineCore pid=7) ERROR [core.py:700] RuntimeError: no kernel for this prompt", flush=True)
    os._exit(7)


async def is_silent() -> web.Response:
    await asyncio.sleep(3600)
    return web.Response()


async def refuses() -> web.Response:
    return web.json_response({"error": {"message": "no"}}, status=400)


async def says_html() -> web.Response:
    return web.Response(text="<html>")


FAULTS = {DIES: dies, SILENT: is_silent, REFUSES: refuses, HTML: says_html}


class Wire:
    """The server; see the module's docstring."""

    def __init__(self, refuses_weights: bool):
        self.version, self.refuses_weights = "default", refuses_weights
        self.going = asyncio.Event()
        self.going.set()
        self.running: dict[str, bool] = {}  # name -> it is to end

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        prompt, params, name = body["token_ids"], body["sampling_params"], "generate-tokens-" + body["request_id"]
        if prompt[0] in FAULTS:
            return await FAULTS[prompt[0]]()
        ids, spans, reason = await self.draw(name, params)
        drawn = [{"token_id": token, "logprob": -(1 + token % 64) / 64, "rank": 1, "top_logprobs": []} for token in ids]
        choice = {"index": 0, "finish_reason": reason, "token_ids": ids, "routed_experts": None,
                  "weight_versions": spans or None, "logprobs": {"content": drawn} if drawn else None}
        if prompt[0] == NONSENSE:
            drawn.pop()
        if prompt[0] == NO_VERSIONS:
            choice["weight_versions"] = None
        return web.json_response({"request_id": name, "choices": [choice]})

    async def draw(self, name: str, params: dict) -> tuple[list[int], list[dict], str]:
        """Tokens, spans of versions, and why it ended."""
        self.running[name] = False
        ids, spans, reason = [], [], "length"
        while len(ids) < params["max_tokens"]:
            await asyncio.sleep(STEP)
            while not self.going.is_set() and not self.running[name]:
                await asyncio.sleep(STEP)
            if self.running[name]:
                reason = "abort"
                break
            if not spans or spans[-1]["version"] != self.version:
                spans.append({"version": self.version, "start": len(ids), "end": len(ids)})
            seed = params["seed"] if params["temperature"] else 0
            number = int(self.version) if self.version.isdecimal() else 0
            ids.append((seed + 7 * len(ids) + 3 * number) % 89)
            spans[-1]["end"] = len(ids)
            if ids[-1] in params["stop_token_ids"]:
                reason = "stop"
                break
        del self.running[name]
        return ids, spans, reason

    async def pause(self, request: web.Request) -> web.Response:
        self.going.clear()
        if request.query["mode"] == "abort":
            self.running = dict.fromkeys(self.running, True)
            await asyncio.sleep(2 * STEP)
        return web.json_response({"status": "paused"})

    async def resume(self, request: web.Request) -> web.Response:
        self.going.set()
        return web.json_response({"status": "resumed"})

    async def abort(self, request: web.Request) -> web.Response:
        names = (await request.json())["request_ids"]
        self.running |= {name: True for name in names if name in self.running}
        return web.json_response({"status": "aborted", "aborted": len(names)})

    async def rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        count = len(json.loads(Path(body["args"][0], "sums.json").read_text()))
        error = "a tensor is not what the trainer wrote" if self.refuses_weights else None
        return web.json_response({"results": [{"tensors": count, "error": error}]})

    async def set_version(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["new_version"]
        return web.json_response({"success": True, "new_version": self.version})

    async def info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-m", dest="module")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--refuse-weights", action="store_true")
    parser.add_argument("--fail", action="store_true")
    parser.add_argument("--fails-once", type=Path, help="where this file is, which is removed")
    arguments, _ = parser.parse_known_args()
    if arguments.fails_once is not None and arguments.fails_once.exists():
        arguments.fails_once.unlink()
        raise RuntimeError("the memory is not free yet")
    if arguments.fail:
        raise ModuleNotFoundError("No module named 'vllm'")
    wire, app = Wire(arguments.refuse_weights), web.Application()
    app.add_routes([
        web.post("/inference/v1/generate", wire.generate), web.post("/abort_requests", wire.abort),
        web.post("/pause", wire.pause), web.post("/resume", wire.resume), web.post("/collective_rpc", wire.rpc),
        web.post("/update_weight_version", wire.set_version), web.get("/weight_info", wire.info),
        web.get("/health", wire.info)])
    web.run_app(app, host=arguments.host, port=arguments.port, print=None, shutdown_timeout=0.1)


if __name__ == "__main__":
    main()
