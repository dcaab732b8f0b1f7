"""The router in front of several servers, which spreads requests over them.

Our own is a process beside the driver, smg or sglang-router, that is started again at the same port when it ends. One
that runs already is used by either of two protocols: /workers, or /add_worker, /remove_worker and /list_workers.
"""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import socket
import sys
import time
from pathlib import Path
from urllib.parse import quote

from miles_core.config.tables import RunConfig
from miles_core.errors import EngineError, MilesError
from miles_core.types import NodeSlot
from miles_core.waits import BEAT
from miles_sglang.awake import awake
from miles_sglang.client import Client
from miles_sglang.forwarded import words
from miles_sglang.plugin import sglang_options
from miles_sglang.server import ServerProcess, ended

START_TIMEOUT = 60.0
"""Seconds that a router may take until it answers, or until a worker is in its list."""
DEFAULTS = {
    # What is in flight is bounded by --server-concurrency, and servers are watched by Miles: a paused server answers no
    # health check, and a long answer is no sign of a wedged one.
    "smg": {"policy": "round_robin", "max_concurrent_requests": 0, "disable_health_check": True,
            "worker_wedge_secs": 10**6, "worker_startup_check_interval": 1, "disable_tokenizer_autoload": True,
            "prometheus_host": "127.0.0.1", "shutdown_grace_period_secs": 1, "log_level": "warn"},
    "sglang-router": {"policy": "round_robin", "max_concurrent_requests": -1, "disable_health_check": True,
                      "worker_startup_check_interval": 1, "prometheus_host": "127.0.0.1",
                      "shutdown_grace_period_secs": 1, "log_level": "warn"},
}  # fmt: skip
INSTALL = {"smg": "pip install smg", "sglang-router": "pip install sglang-router"}


class Router:
    """A router and its workers.

    Args:
        url: of one that runs already; None starts our own.
    """

    def __init__(self, config: RunConfig, log: Path, url: str | None = None):
        self._config, self._options, self._log = config, sglang_options(config), log
        self._kind = self._options.router or "smg"
        self._process = None if url else ServerProcess(NodeSlot())
        self._workers: set[str] = set()  # those that should be in it
        self._old_protocol = False
        self._restarts = 0
        self.alive, self.load = False, 0
        self.client = Client(url or f"http://127.0.0.1:{self._port()}", "the router")

    @property
    def own(self) -> bool:
        """Whether we started it."""
        return self._process is not None

    async def start(self) -> None:
        """Start it, or reach the one that runs; no worker is in it then.

        Raises:
            EngineError: it ends, does not answer, speaks neither protocol, or has workers of another run.
        """
        if self.own:
            await self._launch()
        await self._learn_protocol()
        if unknown := set(await self._list()) - self._workers:
            raise EngineError("the router has workers that this run does not know, with other weights",
                              code="router-has-foreign-workers", got=sorted(unknown),
                              who=f"the router at {self.client.url}",
                              fix="remove them from the router, or use one of its own for this run")
        self.alive = True

    async def add(self, url: str) -> None:
        """Let it send requests to this server, which has to draw tokens: a router asks for one.

        A router that is dead does not get it; nor does a server that is removed meanwhile stay in the way.

        Raises:
            EngineError: the worker is not in its list within START_TIMEOUT seconds.
        """
        self._workers.add(url)
        if not self.alive or url in await self._list():
            return
        if self._old_protocol:
            await self._ask(f"/add_worker?url={quote(url, safe='')}", {})
        else:
            try:
                await self._ask("/workers", {"url": url})
            except EngineError as error:
                if "already in progress" not in str(error.got):  # it still tries, since an earlier `add`
                    raise
        await self._until(url, listed=True)

    async def remove(self, url: str) -> None:
        """Let it send nothing more to this server; one that does not answer is left to `add` and to a restart."""
        self._workers.discard(url)
        if not self.alive or (worker := (await self._list()).get(url)) is None:
            return
        if self._old_protocol:
            await self._ask(f"/remove_worker?url={quote(url, safe='')}", {})
        else:
            await self._ask(f"/workers/{worker}", method="DELETE")
        await self._until(url, listed=False)

    async def ill(self, timeout: float | None) -> str | None:
        """Why it counts as dead; None otherwise. With a `timeout` it is also queried."""
        if self.own and (code := self._process.exit_code()) is not None:
            return f"its process ended with code {code}"
        if timeout is None:
            return None
        begin, heard = time.monotonic(), awake()
        try:
            await self._list(timeout)
        except MilesError as error:
            if time.monotonic() - begin > awake() - heard + BEAT:  # we were blocked, and may have missed its answer
                return None
            return f"no sign of life for {timeout:g} s: {error.got or error.what}"
        return None

    async def revive(self, why: str) -> None:
        """Start our own again at the same port, or wait for one that we did not start. It may have no workers then.

        Raises:
            EngineError: it has been started --max-engine-restarts times, or does not come up.
        """
        self.alive = False
        most = self._options.max_engine_restarts
        if self.own and self._restarts >= most:
            raise EngineError(f"it died after {most} restarts", code="router-died", got=why, who="the router",
                              fix=f"look at {self._log}, or raise --max-engine-restarts")
        self._restarts += 1
        if self.own:
            await asyncio.to_thread(self._process.stop)
        await self.client.reset()
        while not self.alive:
            try:
                await self.start()
            except EngineError:
                if self.own:
                    raise
                await asyncio.sleep(1.0)

    async def stop(self) -> None:
        """End our own, or take our servers out of the one that ran before."""
        if self.own:
            await asyncio.to_thread(self._process.stop)
        else:
            for url in sorted(self._workers):
                try:
                    await self.remove(url)
                except MilesError:
                    break  # it is gone, and no request needs it any more
        await self.client.reset()

    async def _launch(self) -> None:
        port = int(self.client.url.rpartition(":")[2])
        fields = {
            "request_timeout_secs": int(self._config.rollout.rollout_timeout) + 60,
            "prometheus_port": self._process.free_ports(1)[0],
            **DEFAULTS[self._kind], **self._config.surface("router"), "host": "127.0.0.1", "port": port,
        }  # fmt: skip
        command = [*launcher(self._kind), *words("router", fields)]
        self._process.start(command, {}, self._log)
        until = time.monotonic() + START_TIMEOUT
        while True:
            code = self._process.exit_code()
            if code is not None or time.monotonic() > until:
                raise ended(f"the router at {self.client.url}", code, self._process.tail(40), self._log, START_TIMEOUT)
            try:
                await self._list_new()
                return
            except MilesError:
                await asyncio.sleep(0.1)

    def _port(self) -> int:
        """The port that was asked for, while it is free, else any.

        Raises:
            EngineError: another process listens on the port that was asked for.
        """
        port = self._options.router_port
        if port is None:
            return self._process.free_ports(1)[0]
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                raise EngineError("the router's port cannot be used", code="router-port-unusable", got=error.strerror,
                                  who=f"--sglang-router-port {port}",
                                  fix="name a free port, or leave it out to use any; a router that already runs needs "
                                      "--sglang-router-ip too") from None
        return port

    async def _learn_protocol(self) -> None:
        errors = []
        for old, listing in ((False, self._list_new), (True, self._list_old)):
            try:
                await listing()
                self._old_protocol = old
                return
            except MilesError as error:
                errors.append(error.got or error.what)
        raise EngineError("it answers neither /workers nor /list_workers", got="; ".join(map(str, errors)),
                          who=f"the router at {self.client.url}", code="router-without-worker-list",
                          fix="check --sglang-router-ip and --sglang-router-port")

    async def _list(self, timeout: float = 10.0) -> dict[str, str]:
        """Worker URL -> what the router calls it."""
        return await (self._list_old(timeout) if self._old_protocol else self._list_new(timeout))

    async def _list_new(self, timeout: float = 10.0) -> dict[str, str]:
        listing = await self.client.call("/workers", timeout=timeout)
        return {worker["url"].rstrip("/"): worker["id"] for worker in listing.get("workers", ())}

    async def _list_old(self, timeout: float = 10.0) -> dict[str, str]:
        listing = await self.client.call("/list_workers", timeout=timeout)
        return {url.rstrip("/"): url for url in listing.get("urls", ())}

    async def _ask(self, path: str, body: dict | None = None, method: str | None = None) -> dict:
        return await self.client.call(path, body, timeout=10.0, method=method)

    async def _until(self, url: str, *, listed: bool) -> None:
        until = time.monotonic() + START_TIMEOUT
        while (url in await self._list()) is not listed:
            if listed and url not in self._workers:
                return
            if time.monotonic() > until:
                raise EngineError(f"the router did not {'take' if listed else 'give up'} a worker within "
                                  f"{START_TIMEOUT:g} s", got=url, who=f"the router at {self.client.url}",
                                  fix=f"look at {self._log}", code="router-worker-timeout")
            await asyncio.sleep(0.1)


def launcher(kind: str) -> list[str]:
    """The words that start a router of this kind.

    Raises:
        EngineError: it is not installed.
    """
    module = {"smg": "smg", "sglang-router": "sglang_router"}[kind]
    if importlib.util.find_spec(module) is not None:
        return [sys.executable, "-m", f"{module}.launch_router"]
    if program := shutil.which(kind):  # in an environment of its own
        return [program, "launch"]
    raise EngineError(f"the router {kind} is not installed", code="router-not-installed", who=f"--router {kind}",
                      fix=f"{INSTALL[kind]}, or --router none and Miles spreads the requests")

