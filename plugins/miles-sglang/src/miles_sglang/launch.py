"""Launching and ending one server, on the hosts of the placement or where it is already running."""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from miles_core.config.tables import RunConfig
from miles_core.errors import ConfigError, DiedError, EngineError, MilesError
from miles_core.hosts import Handle
from miles_core.stages.placement import logs
from miles_core.types import NodeSlot
from miles_sglang.arguments import LOADER, command, environment
from miles_sglang.awake import awake
from miles_sglang.background import together
from miles_sglang.client import Client
from miles_sglang.plugin import sglang_options
from miles_sglang.server import ended, raised

TAIL = 5000
"""Lines of a log in which an exception is looked for: stacks of the processes that outlived it follow it."""
PORT_TRIES = 2
"""A free port may be taken before the server has it."""


@dataclass(eq=False)
class Server:
    """One engine: a server, on one node or several.

    Args:
        name: how people call it, such as "engine 0".
        client: its address; another one after a restart.
        seats, handles: its nodes; none for a server that ran already.
        size: its GPUs.
        version: of the weights that it is known to serve; 0 at a start.
        alive: it answers, as far as is known.
        fault: why it counts as dead, until it is revived.
        announced: that it does has been told.
        load: its requests in flight.
        info: what it said about itself when it came up.
        seen, next_look: when it last answered a health check, and when the next is due, by `awake`.
        waited: it does not answer and is waited for, because kernels are compiled.
    """

    name: str
    client: Client
    seats: tuple[NodeSlot, ...] = ()
    handles: tuple[Handle, ...] = ()
    size: int = 1
    version: int = 0
    alive: bool = False
    fault: str | None = None
    announced: bool = False
    restarts: int = 0
    load: int = 0
    info: dict[str, Any] = field(default_factory=dict)
    seen: float = 0.0
    next_look: float = 0.0
    waited: bool = False

    @property
    def url(self) -> str:
        """http://HOST:PORT."""
        return self.client.url

    def answers(self) -> None:
        """It has come up, with unknown weights."""
        self.alive, self.fault, self.announced, self.version, self.seen = True, None, False, 0, awake()


async def launch(server: Server, config: RunConfig) -> None:
    """Start it on all its nodes, and wait until it draws a token.

    Raises:
        EngineError: it ends, or takes longer than --server-start-timeout; with the end of its log.
    """
    for attempt in range(PORT_TRIES):
        port, meeting = await server.handles[0].free_ports(2)
        host = server.seats[0].host
        await server.client.reset()
        server.client = Client(f"http://{host}:{port}", server.name)
        at = f"{host}:{meeting}" if len(server.seats) > 1 else None
        await together(handle.start(_command(config, seat, port, at), environment(config, seat), _log(config, seat))
                       for seat, handle in zip(server.seats, server.handles, strict=True))
        try:
            await _ready(server, config)
            return
        except EngineError as error:
            await end(server)
            if "port is in use" not in error.what or attempt == PORT_TRIES - 1:
                raise


async def attach(server: Server, config: RunConfig, timeout: float = 30.0) -> None:
    """Connect to a server that is already running; it has `timeout` seconds to answer.

    Raises:
        EngineError: it does not answer, or cannot take weights from this run.
    """
    who = f"--rollout-external-engine-addrs {server.url.removeprefix('http://')}"
    try:
        info = await server.client.server_info(timeout)
        await server.client.abort()  # an earlier run may have left it paused and with requests, or we did, when it hung
        await server.client.resume()
    except MilesError as error:
        raise EngineError("no SGLang server answers at this address", got=error.got or error.what, who=who,
                          fix="start it, or correct the address", code="external-server-unreachable") from error
    if not config.debug.debug_rollout_only and LOADER not in (info.get("custom_weight_loader") or ()):
        raise EngineError("the server cannot verify the weights that it is sent",
                          code="external-server-unverified", who=who,
                          got=f"custom_weight_loader {info.get('custom_weight_loader')}",
                          fix=f"start it with --custom-weight-loader {LOADER}, and with "
                              "plugins/miles-sglang/src/miles_sglang/server_extension on its PYTHONPATH")
    server.info, server.size = info, int(info.get("tp_size", 1)) * int(info.get("pp_size", 1))
    server.answers()


async def exited(server: Server) -> str | None:
    """What became of its processes, None while they run."""
    for seat, handle in zip(server.seats, server.handles, strict=True):
        try:
            code = await handle.exit_code()
        except DiedError as error:
            return f"its host died: {error.got or error.what}"
        if code is not None:
            which = f" of node {seat.node}" if seat.nodes > 1 else ""
            return f"its process{which} ended with code {code}"
    return None


async def compilers(server: Server) -> set[str]:
    """Names of the compilers that its processes run; unknown for a server that the run did not start."""
    return {name for handle in server.handles for name in await handle.compilers()}


async def end(server: Server) -> None:
    """End what is left of it; calls that wait for an answer fail at once."""
    server.alive, server.version = False, 0
    await asyncio.gather(*(handle.stop() for handle in server.handles), return_exceptions=True)
    await server.client.reset()


async def traced(server: Server, config: RunConfig) -> tuple[str | None, Path | None]:
    """The last exception since its start, and the log that has it; without one the log of the node that answers. A
    server that the run did not start has neither."""
    for seat, handle in zip(server.seats, server.handles, strict=True):
        with suppress(MilesError):  # a host that died
            if (exception := raised(await handle.tail(TAIL))) is not None:
                return exception, _log(config, seat)
    return None, _log(config, server.seats[0]) if server.seats else None


async def _ready(server: Server, config: RunConfig) -> None:
    bound = sglang_options(config).server_start_timeout
    until = time.monotonic() + bound
    while True:
        for seat, handle in zip(server.seats, server.handles, strict=True):
            code = await handle.exit_code()
            if code is not None or time.monotonic() > until:
                raise ended(server.name, code, await handle.tail(200), _log(config, seat), bound)
        try:
            await server.client.healthy(timeout=min(30.0, bound))
            server.info = await server.client.server_info()
            break
        except MilesError:
            await asyncio.sleep(0.5)
    server.answers()


def _command(config: RunConfig, seat: NodeSlot, port: int, meeting: str | None) -> list[str]:
    words = command(config, seat, port, meeting)
    if config.rollout.pause_generation_mode == "in_place":
        words.append("--incremental-streaming-output")  # answers are streamed then; else each piece repeats all
    return words


def _log(config: RunConfig, seat: NodeSlot) -> Path:
    return logs(config) / f"engine-{seat.engine}{f'-node-{seat.node}' if seat.nodes > 1 else ''}.log"


def check_installed(config: RunConfig) -> None:
    """
    Raises:
        ConfigError: servers are to be started, and SGLang is not installed. A plan can be made without it.
    """
    options = sglang_options(config)
    if not (options.server_command or options.rollout_external) and find_spec("sglang") is None:
        raise ConfigError("SGLang is not installed in this Python", got=sys.executable, who="engine sglang",
                          fix="pip install 'miles-sglang[server]', name another Python's with --server-command PYTHON "
                          "-m sglang.launch_server, or write --engine local", code="sglang-not-installed")
