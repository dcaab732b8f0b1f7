"""Group: the reward model's servers, started, watched and restarted by one thread that lives as long as they do."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import urllib.request
from pathlib import Path

from miles_sglang.server import ServerProcess, ended

from miles_core.config import RunConfig
from miles_core.errors import EngineError, MilesError
from miles_core.stages.placement import demand, visible_gpus
from miles_core.types import NodeSlot
from miles_reward_model.plugin import RewardModelOptions
from miles_reward_model.served import served

ADDRESSES = "reward-model.json"
"""In the run directory: {"urls": addresses that answer, "error": why there will be no more, or null}."""
LOOK = 0.5
"""Seconds between looks at exit codes."""
STOP_SECONDS = 20.0


class _Server:
    """One server of the group; `url` is None while it is down."""

    def __init__(self, index: int, gpus: tuple[int, ...], log: Path):
        self.name, self.log, self.restarts = f"reward server {index}", log, 0
        self.process = ServerProcess(NodeSlot(engine=index, gpus=gpus))
        self.url: str | None = None
        self.port, self.due, self.seen = 0, 0.0, 0.0


class Group:
    """All servers. They belong to a thread, as the kernel ends them with the thread that started them.

    Args:
        run_dir: gets their logs and addresses.
    """

    def __init__(self, options: RewardModelOptions, config: RunConfig, run_dir: Path):
        self._options, self._folder = options, run_dir
        self._model = Path(str(options.reward_model_path))
        if options.reward_model_kind == "classifier":
            self._model = served(self._model, run_dir / "reward-model")
        each, first, gpus = options.reward_num_gpus_per_engine, demand(config), visible_gpus()
        count = options.reward_num_gpus // each
        self._servers = [_Server(i, gpus[first + i * each : first + (i + 1) * each],
                                 run_dir.resolve() / "logs" / f"reward-{i}.log") for i in range(count)]
        self._ready, self._stopping = threading.Event(), threading.Event()
        self._failure: MilesError | None = None
        self._thread = threading.Thread(target=self._run, name="reward model", daemon=True)

    def start(self) -> None:
        """Start them, and wait until each answers.

        Raises:
            EngineError: one does not come up.
        """
        (self._folder / ADDRESSES).unlink(missing_ok=True)  # an earlier start's
        self._thread.start()
        self._ready.wait(self._options.server_start_timeout + STOP_SECONDS)
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """End all servers; bounded."""
        self._stopping.set()
        self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        try:
            self._launch(self._servers)
            self._ready.set()
            while not self._stopping.wait(LOOK):
                for server in self._servers:
                    if (why := self._ill(server)) is not None:
                        self._revive(server, why)
        except MilesError as error:
            self._failure = error
            self._publish(str(error))
        finally:
            self._ready.set()
            for server in self._servers:
                server.process.stop()

    def _launch(self, servers: list[_Server]) -> None:
        for server in servers:
            [server.port] = server.process.free_ports(1)
            server.process.start(self._command(server.port), _environment(server.process.seat), server.log)
        until = time.monotonic() + self._options.server_start_timeout
        for server in servers:
            url = f"http://{server.process.seat.host}:{server.port}"
            while not answers(url + "/health", 10.0):
                code = server.process.exit_code()
                if self._stopping.is_set():
                    return
                if code is not None or time.monotonic() > until:
                    raise ended(server.name, code, server.process.tail(200), server.log,
                                self._options.server_start_timeout)
                self._stopping.wait(LOOK)
            server.url, server.due, server.seen = url, 0.0, time.monotonic()
        self._publish(None)

    def _ill(self, server: _Server) -> str | None:
        if (code := server.process.exit_code()) is not None:
            return f"its process ended with code {code}"
        now = time.monotonic()
        if now < server.due:
            return None
        server.due = now + self._options.health_check_interval
        # Not /health: a busy server lets that wait. This is answered between two steps.
        if answers(f"{server.url}/server_info", self._options.health_check_timeout):
            server.seen = time.monotonic()
            return None
        if time.monotonic() - server.seen < self._options.health_check_timeout:
            return None
        return f"no sign of life for {self._options.health_check_timeout:g} s"

    def _revive(self, server: _Server, why: str) -> None:
        server.url = None
        self._publish(None)
        server.process.stop()
        if server.restarts >= self._options.max_restarts:
            raise EngineError(f"it died after {server.restarts} restarts", code="reward-server-died", got=why,
                              who=server.name, fix=f"look at {server.log}, or raise reward-model.max_restarts")
        server.restarts += 1
        self._launch([server])

    def _publish(self, error: str | None) -> None:
        """Replace the file of addresses in one step: a reader never sees a part of it."""
        temporary = self._folder / f".{ADDRESSES}"
        urls = [server.url for server in self._servers if server.url is not None]
        temporary.write_text(json.dumps({"urls": urls, "error": error}))
        os.replace(temporary, self._folder / ADDRESSES)

    def _command(self, port: int) -> list[str]:
        of = self._options
        start = of.server_command or [sys.executable, "-m", "sglang.launch_server"]
        kind = ["--is-embedding"] if of.reward_model_kind == "classifier" else []
        return [*start, "--model-path", str(self._model), "--host", "127.0.0.1", "--port", str(port),
                "--tp-size", str(of.reward_num_gpus_per_engine), "--skip-server-warmup",
                *kind, *of.server_args]


def answers(url: str, timeout: float) -> bool:
    """Whether a GET of this address on this machine is answered with 200 in time."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout) as response:
            return bool(response.status == 200)
    except (OSError, ValueError):
        return False


def _environment(seat: NodeSlot) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, seat.gpus))} if seat.gpus else {}
