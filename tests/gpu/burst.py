"""What a run's engine takes alone: in its third rollout its server gets the same requests once more, from here."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import Request, urlopen

from miles_core.config import RunConfig
from miles_core.hookspecs import hookimpl

ROLLOUT = 3
"""By then kernels are compiled."""


class Burst:
    """Writes burst.json into the run's directory: new tokens, and seconds of the same requests; where the run asks for
    routes, also without them. Of a run with one server."""

    name = "burst"

    def __init__(self, config: RunConfig):
        self.run_dir, self.rollouts = Path(config.checkpoint.run_dir), 0
        self.routes = bool(config.surface("server").get("enable_return_routed_experts"))

    @hookimpl
    def shape_rewards(self, groups: list) -> list:
        """The groups as they are. A rollout is complete, and its engine idle and awake with the same weights."""
        self.rollouts += 1
        if self.rollouts != ROLLOUT:
            return groups
        logs = "".join(log.read_text(errors="replace") for log in (self.run_dir / "logs").glob("*.log"))
        if ports := re.findall(r"Uvicorn running on http://127\.0\.0\.1:(\d+)", logs):
            bodies = [{"input_ids": list(group.prompt.token_ids), "return_logprob": True,
                       "sampling_params": {"temperature": 1.0, "max_new_tokens": sample.response_length,
                                           "ignore_eos": True}} for group in groups for sample in group.samples]
            measured = {"tokens": sum(body["sampling_params"]["max_new_tokens"] for body in bodies)}
            for name, routes in [("seconds", self.routes), ("without_routes", False)][:1 + self.routes]:
                same = [body | {"return_routed_experts": routes} for body in bodies]
                seconds = [timed(ports[-1], same) for _ in range(3)][1:]  # the first may compile
                measured[name] = sum(seconds) / len(seconds)
            (self.run_dir / "burst.json").write_text(json.dumps(measured))
        return groups


def timed(port: str, bodies: list[dict]) -> float:
    """Seconds until all are answered."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(len(bodies)) as pool:
        list(pool.map(lambda body: asked(port, body), bodies))
    return time.perf_counter() - begin


def asked(port: str, body: dict) -> bytes:
    """A server's answer."""
    request = Request(f"http://127.0.0.1:{port}/generate", json.dumps(body).encode(),
                      {"Content-Type": "application/json"})
    return urlopen(request, timeout=600).read()
