"""What the driver costs: CPU seconds per million tokens and memory, with servers that answer at once.

    python bench/driver.py                              two minutes; a Markdown table
    python bench/driver.py --engines 1 64 --requests 16 --readers 0 1

The shipped loop with plugin sglang (`--rollout-external --debug-rollout-only`) asks servers of this script, whose
answers are bytes made beforehand: what is left is what the driver does with each token. Routes come as narrow as from
servers that Miles starts, or `wide`, in int32. CPU seconds are those of the loop's process and of its children from the
end of the first rollout to that of the last, so that the start does not count. Memory is what the loop's process and
its readers have at both ends.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import orjson
import torch
from aiohttp import web
from miles_sglang.server_extension.routes.miles_routes import narrowed

MODEL = Path(__file__).parents[1] / "examples/arithmetic"
ROUTED = 48, 8
"""Layers, and experts of a token."""
MIXTURE = {"num_hidden_layers": ROUTED[0], "num_experts": 128, "num_experts_per_tok": ROUTED[1]}


METER = """
import json
import os

import psutil
from miles_core import hookimpl


class Meter:
    @hookimpl
    def metrics(self, rollout_id, values):
        every = [psutil.Process(), *psutil.Process().children(recursive=True)]
        cpu = [sum(one.cpu_times()[:2]) for one in every]
        memory = [one.memory_info().rss / 2**20 for one in every]
        with open(os.environ["METER"], "a") as file:
            file.write(json.dumps([cpu[0], sum(cpu), memory[0], sum(memory[1:])]) + "\\n")
"""
"""A plugin that notes what was used so far after each rollout."""


class Answers:
    """A server's answers of so many tokens, each made once."""

    def __init__(self, tokens: int, wide: bool):
        draw = np.random.default_rng(0)
        self.tokens, self.version, self.wide = tokens, "default", wide
        self.ids = draw.integers(10, 250, tokens).tolist()
        log_probs = np.round(-3 * draw.random(tokens), 9).tolist()
        self.meta = {
            "finish_reason": {"type": "length", "length": tokens}, "num_retractions": 0, "input_token_logprobs": [],
            "output_token_logprobs": [[value, token, None] for value, token in zip(log_probs, self.ids, strict=True)],
            "completion_tokens": tokens, "cached_tokens": 0, "e2e_latency": 0.1}
        self._made: dict[tuple, bytes] = {}

    async def generate(self, request: web.Request) -> web.Response:
        """Everything at once."""
        body = await request.json()
        prompt, first = len(body["input_ids"]), int(body.get("routed_experts_start_len", 0))
        key = prompt, first, bool(body.get("return_routed_experts")), self.version
        if key not in self._made:
            meta = {**self.meta, "id": "0", "prompt_tokens": prompt, "weight_version": self.version}
            if key[2]:
                shape = prompt + self.tokens - 1 - first, ROUTED[0], 1
                routes = np.broadcast_to(np.arange(ROUTED[1], dtype=np.int32), (*shape[:2], ROUTED[1]))
                data = routes if self.wide else narrowed(torch.from_numpy(routes.copy())).numpy()
                meta["routed_experts"] = base64.b64encode(data.tobytes()).decode()
            self._made[key] = orjson.dumps({"text": "", "output_ids": self.ids, "meta_info": meta})
        return web.Response(body=self._made[key], content_type="application/json")

    async def control(self, request: web.Request) -> web.Response:
        """Whatever it is told, it is done; weights come as a version."""
        body = await request.json() if request.can_read_body else {}
        self.version = body.get("weight_version", body.get("version", self.version))
        return web.json_response({"success": True, "message": ""})

    async def info(self, request: web.Request) -> web.Response:
        """What an external server has to say of itself."""
        return web.json_response({
            "weight_version": self.version, "custom_weight_loader": ["miles_weights.load"], "tp_size": 1,
            "max_req_input_len": 2**20, "model_path": "x", "version": "0.5.16", "served_model_name": "x"})


async def serve(engines: int, tokens: int, wide: bool, ready: Path) -> None:
    """Servers until this process is ended; their ports are written to `ready`."""
    ports, answers = [], Answers(tokens, wide)
    for _ in range(engines):
        app = web.Application(client_max_size=2**30)
        app.router.add_post("/generate", answers.generate)
        app.router.add_post("/{name}", answers.control)
        app.router.add_get("/{name}", answers.info)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        ports.append(site._server.sockets[0].getsockname()[1])
    ready.with_suffix(".part").write_text(json.dumps(ports))
    ready.with_suffix(".part").rename(ready)
    await asyncio.Event().wait()


def checkpoint(folder: Path, routes: bool) -> Path:
    """A tokenizer, and a config.json as large as a real model's: nothing loads weights here."""
    source, target = MODEL / ("tiny-qwen3-moe" if routes else "tiny-qwen3"), folder / "model"
    if not target.exists():
        shutil.copytree(source, target)
        config = json.loads((source / "config.json").read_text()) | {"max_position_embeddings": 2**20}
        (target / "config.json").write_text(json.dumps(config | (MIXTURE if routes else {})))
    return target


def run(folder: Path, ports: list[int], args: argparse.Namespace, routes: bool, readers: int) -> np.ndarray:
    """[rollouts, 4] after each: CPU seconds of the loop's process and of all, MiB of the former and of its children."""
    used, rollouts = folder / "used", 1 + args.rollouts
    (folder / "meter.py").write_text(METER)
    os.environ["METER"] = str(used)
    words = [
        Path(sys.executable).with_name("miles"), "run", "--plugin", folder / "meter.py", "--no-live",
        "--run-dir", folder / f"run-{rollouts}",
        "--hf-checkpoint", checkpoint(folder, routes), "--prompt-data", MODEL / "train.jsonl", "--input-key", "prompt",
        "--label-key", "label", "--apply-chat-template", "--rm-type", "math", "--advantage-estimator", "grpo",
        "--debug-rollout-only", "--plan-without-weights", "--rollout-external", "--rollout-external-engine-addrs",
        *(f"127.0.0.1:{port}" for port in ports), "--rollout-num-gpus", len(ports),
        "--rollout-num-gpus-per-engine", 1, "--rollout-batch-size", args.requests * len(ports) // 8,
        "--n-samples-per-prompt", 8, "--num-rollout", rollouts, "--rollout-max-response-len", args.tokens,
        "--sglang.router", "none", "--health-check-timeout", 120, "--readers", readers,
        *(["--plugin", "r3"] if routes else []), *args.flags]
    log = folder / "log.txt"
    with open(log, "wb") as output:
        code = subprocess.run(list(map(str, words)), stdout=output, stderr=output).returncode
    if code:
        raise SystemExit(log.read_text()[-3000:])
    return np.array([json.loads(line) for line in used.read_text().splitlines()])


def measured(args: argparse.Namespace, engines: int, routes: str, readers: int) -> list[float]:
    """CPU seconds per million tokens, of the loop's process and of all; then MiB of the former and of its children,
    each after the first and the last rollout."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = [sys.executable, __file__, "--serve", str(folder / "ports"), "--engines", str(engines),
                 "--tokens", str(args.tokens), "--routes", routes]
        server = subprocess.Popen(words)
        try:
            while not (folder / "ports").exists():
                if server.poll() is not None:
                    raise SystemExit("the servers ended")
                time.sleep(0.05)
            ports = json.loads((folder / "ports").read_text())
            used = run(folder, ports, args, routes != "off", readers)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()
    million = args.rollouts * engines * args.requests * args.tokens / 1e6
    return [*((used[-1] - used[0])[:2] / million), *used[[0, -1], 2], *used[[0, -1], 3]]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[1])
    parser.add_argument("--requests", type=int, default=256, help="of a rollout, for each engine")
    parser.add_argument("--tokens", type=int, default=4096, help="of each answer")
    parser.add_argument("--rollouts", type=int, default=3)
    parser.add_argument("--routes", nargs="+", choices=("off", "on", "wide"), default=["off", "on"])
    parser.add_argument("--readers", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="for miles run; come last")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        asyncio.run(serve(args.engines[0], args.tokens, args.routes == ["wide"], args.serve))
    print(f"{args.requests} requests x {args.tokens} tokens a rollout and engine\n")
    print("| engines | routes | readers | loop, s per million tokens | all | loop, MiB | readers, MiB |", flush=True)
    print("|---|---|---|---|---|---|---|", flush=True)
    shown = {"off": "-", "on": "48 x 8", "wide": "48 x 8, int32"}
    for engines, routes, readers in itertools.product(args.engines, args.routes, args.readers):
        own, total, *memory = measured(args, engines, routes, readers)
        print(f"| {engines} | {shown[routes]} | {readers} | {own:.2f} | {total:.2f} | "
              "{:.0f} -> {:.0f} | {:.0f} -> {:.0f} |".format(*memory), flush=True)


if __name__ == "__main__":
    main()
