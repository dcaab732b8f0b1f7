"""The servers of an engine and the router in front of them: which are in use, dead, or being restarted."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress

from miles_core.config.tables import RunConfig
from miles_core.errors import EngineDiedError, EngineError, MilesError, SyncError
from miles_core.hosts import Handle
from miles_core.stages.placement import Placement, logs
from miles_core.types import NodeSlot
from miles_sglang.awake import awake
from miles_sglang.background import together
from miles_sglang.client import Client
from miles_sglang.health import Health
from miles_sglang.launch import Server, attach, compilers, end, exited, launch, traced
from miles_sglang.plugin import sglang_options
from miles_sglang.request_scheduler import Endpoint
from miles_sglang.router import Router
from miles_sglang.server import ServerProcess

LOOK = 0.5
"""Seconds between looks at exit codes."""
HOST_TIMEOUT = 60.0
"""Seconds that a host may take for a call; none of them waits for anything."""


async def _nothing() -> None:
    """Restarted servers get no weights."""


class ServerPool:
    """All servers of the run.

    Attributes:
        version: of the weights that servers in use have.
        memory: servers hold all of theirs; without it none is started.
        loss: of the server that was lost last, and why.
        recover: brings weights to servers that have others; called again while there are some.
        event: told what became of servers, by kind and fields.
        admit: called when there may be more room for requests.
    """

    def __init__(self, config: RunConfig, placement: Placement):
        self._config, self._options, self._placement = config, sglang_options(config), placement
        self.servers: list[Server] = []
        self.router: Router | None = None
        self.version = 0
        self.memory = True
        self.loss: str | None = None
        self.recover: Callable[[], Awaitable] = _nothing
        self.event: Callable[..., None] = lambda kind, **fields: None
        self.admit: Callable[[], None] = lambda: None
        self._serving, self._changed, self._doubt = False, 0.0, asyncio.Event()
        self._recovering, self._routing = asyncio.Lock(), asyncio.Lock()
        self._health = Health()

    @property
    def serving(self) -> bool:
        """Requests may be sent. While they may not, a server may be busy with an update and answer no health check."""
        return self._serving

    @serving.setter
    def serving(self, value: bool) -> None:
        self._serving, self._changed = value, awake()

    async def open(self) -> None:
        """Start every server, all at the same time, or reach those that run; then the router.

        Raises:
            EngineError: one of them does not come up, or is not fit for the run; says why, with the end of its log.
        """
        options = self._options
        if options.rollout_external:
            for address in options.rollout_external_engine_addrs:
                name = f"external engine {len(self.servers)}"
                url = address if re.match(r"https?://", address) else f"http://{address}"
                self.servers.append(Server(name, Client(url, name)))
            await together(attach(server, self._config) for server in self.servers)
        else:
            await self._take_seats()
            await together(launch(server, self._config) for server in self.servers)
        url = None if options.router_ip is None else f"http://{options.router_ip}:{options.router_port}"
        if options.router != "none" and (url or options.router or len(self.servers) > 1):
            self.router = Router(self._config, logs(self._config) / "router.log", url, self._health)
            await self.router.start()
            await self.route()

    def usable(self, server: Server) -> bool:
        """Whether a server is alive and serves the current weights."""
        trained = self.version > 0 or self._config.debug.debug_rollout_only
        return server.alive and server.version == self.version and trained

    def endpoints(self) -> list[tuple[Endpoint, int]]:
        """Where requests may be sent now, and the most that may be in flight there."""
        most = self._options.server_concurrency
        usable = [server for server in self.servers if self.usable(server)] if self.serving else []
        if self.router is None:
            return [(server, most) for server in usable]
        return [(self.router, most * len(usable))] if self.router.alive else []

    async def each(self, call: Callable[[Server], Coroutine], servers: Iterable[Server] | None = None) -> None:
        """Call servers concurrently; one whose call fails is ended, and its watch restarts it."""
        async def tell(server: Server) -> None:
            try:
                await call(server)
            except MilesError as error:
                await self._lost(server, str(error))
                await end(server)

        chosen = self.servers if servers is None else servers
        await asyncio.gather(*(tell(server) for server in chosen if server.alive))

    async def abort(self, rids: Sequence[str] | None) -> None:
        """End these requests, or all. Behind a router it is unknown which server has one, so all are told; one that
        does not answer is left to its watch."""
        clients = [server.client for server in self.servers if server.alive]
        each = [None] if rids is None else rids
        await asyncio.gather(*(client.abort(rid) for client in clients for rid in each), return_exceptions=True)

    async def confirm(self, servers: Sequence[Server], version: int, *, flush: bool) -> None:
        """Verify that servers have these weights, flush their caches, and put them into use.

        One whose process has ended meanwhile holds nothing: its watch starts it again, and it is brought up to date.

        Raises:
            SyncError: a server has another version, or lives and cannot be asked; none of them is used.
        """
        have = await asyncio.gather(*(self._has(server, version, flush) for server in servers))
        self.version = version
        for server, has in zip(servers, have, strict=True):
            if has and server.alive:
                server.version = version

    async def route(self) -> None:
        """Register every server in use with the router, which probes each for one token.

        Raises:
            EngineError: the router lives and does not take one.
        """
        if self.router is None:
            return
        async with self._routing:
            try:
                await asyncio.gather(*(self.router.add(server.url) for server in self.servers if self.usable(server)))
            except MilesError:
                if await self.router.ill(self._options.health_check_timeout) is None:
                    raise
                # Its watch starts it again, and has them routed.

    async def recheck(self) -> None:
        """After an answer from other weights: a server that has them is not used until it is brought up to date."""
        for server in filter(self.usable, self.servers):
            with suppress(MilesError):
                reported = (await server.client.model_info()).get("weight_version")
                if self.usable(server) and str(reported) != str(server.version):
                    self.event("engine_stale", engine=server.name, says=reported, expected=server.version,
                               text=f"{server.name} answers from version {reported} and not from {server.version}; it "
                               "is not used until it has that one")
                    server.version = 0
                    if self.router is not None:
                        await self.router.remove(server.url)

    def doubt(self) -> None:
        """A request has failed: servers and router are looked at now, for each try at a dead one would count."""
        self._doubt.set()

    async def watch(self, server: Server) -> None:
        """Watch a server forever: restart it when it dies, and update it when its weights are stale.

        Raises:
            EngineError: it cannot be revived.
        """
        while True:
            await self._next_look()
            if (why := await self._ill(server)) is not None:
                await self._lost(server, why)
                await self._revive(server)
            elif self.serving and self._stale(server):
                async with self._recovering:
                    if self.serving and self._stale(server):
                        await self.recover()

    async def watch_router(self) -> None:
        """Watch the router forever.

        Raises:
            EngineError: it cannot be started again.
        """
        due = 0.0
        while True:
            await self._next_look()
            now = awake()
            why = await self.router.ill(self._options.health_check_timeout if now >= due else None)
            if now >= due:
                due = now + self._options.health_check_interval
            if why is not None:
                self.event("router_lost", why=why, text=f"the router is lost: {why}")
                await self.router.revive(why)
                if self.serving:  # else they draw no tokens now; whoever lets them go has them routed
                    await self._route_again()
                self.event("router_restarted", text="the router serves again")
                self.admit()

    async def close(self) -> None:
        """End all servers that we started, and our router; bounded."""
        await asyncio.gather(*(end(server) for server in self.servers),
                             *([self.router.stop()] if self.router else ()))
        await asyncio.gather(*(handle.close() for server in self.servers for handle in server.handles))
        await self._health.close()

    async def _take_seats(self) -> None:
        handles = self._placement.servers(ServerProcess)
        for handle in handles:
            handle.timeout = HOST_TIMEOUT
        nodes: dict[int, list[tuple[NodeSlot, Handle]]] = {}
        for seat, handle in zip(await together(handle.where() for handle in handles), handles, strict=True):
            nodes.setdefault(seat.engine, []).append((seat, handle))
        for engine, pairs in sorted(nodes.items()):
            name, (seats, hosts) = f"engine {engine}", zip(*pairs, strict=True)
            self.servers.append(Server(name, Client(f"http://{seats[0].host}", name), seats, hosts,
                                       self._config.perf.rollout_num_gpus_per_engine))

    async def _ill(self, server: Server) -> str | None:
        """Why a server counts as dead; None otherwise. Checks exit codes and, at intervals, queries the server."""
        if server.fault is not None:
            return server.fault
        if (why := await exited(server)) is not None:
            return why
        options, begin = self._options, awake()  # its silence counts only while we could hear it
        if begin < server.next_look:
            return None
        server.next_look = begin + options.health_check_interval
        # Not /health: a busy server lets it wait, and a pause waits a second for it.
        question = Client.server_info if self.serving else Client.model_info
        try:
            await self._health.ask(server.client, lambda client: question(client, None), options.health_check_timeout)
        except MilesError as error:
            server.next_look = 0.0
            silent = awake() - server.seen
            if self._changed <= begin and silent > options.health_check_timeout and not await self._compile(server):
                return await exited(server) or f"no sign of life for {options.health_check_timeout:g} s: {error.what}"
        else:
            server.seen, server.waited = awake(), False
        return None

    async def _compile(self, silent: Server) -> bool:
        """Whether a silent server is to be waited for, because it or another one, whose kernels it may wait for, builds
        some. It began as it served: to end it would have it begin again."""
        limit = self._options.server_start_timeout
        with suppress(MilesError):  # a host that died; who looks after its server says so
            built = sorted({name for server in self.servers for name in await compilers(server)})
            before, silent.waited = silent.waited, bool(built) and awake() - silent.seen < limit
            if silent.waited and not before:
                what = ", ".join(built)
                self.event("engine_compiles", engine=silent.name, what=what, limit=limit, level="info",
                           text=f"{silent.name} does not answer while kernels are compiled ({what}); it is waited for, "
                           f"up to {limit:g} s")
            return silent.waited
        return False

    async def _route_again(self) -> None:
        try:
            await self.route()
        except MilesError:
            if self.serving:  # else they were paused meanwhile
                raise

    def _stale(self, server: Server) -> bool:
        return server.alive and server.version != self.version

    async def _next_look(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._doubt.wait(), LOOK)
        self._doubt.clear()

    async def _lost(self, server: Server, why: str) -> None:
        server.alive, server.version, server.fault = False, 0, server.fault or why
        exception, log = await traced(server, self._config)
        if not server.announced:  # by its watch, or whom it failed
            server.announced, server.fault = True, f"{why}, after {exception}" if exception else why
            self.loss, where = f"{server.name} is lost: {server.fault}", f". Its log: {log}" if log else ""
            self.event("engine_lost", engine=server.name, why=server.fault, log=log and str(log),
                       text=f"{self.loss}{where}")

    async def _revive(self, server: Server) -> None:
        most = self._options.max_engine_restarts
        if self.router is not None:
            with suppress(MilesError):  # a router that is gone gets no dead worker when it is back
                await self.router.remove(server.url)
            if not server.handles:  # it may hang, and we cannot end it: nor would the router's calls to it end
                await self.router.client.reset()
        await end(server)
        while not self.memory:
            await asyncio.sleep(LOOK)
        if server.handles:
            if server.restarts >= most:
                _, log = await traced(server, self._config)
                raise EngineDiedError(f"it died after {most} restarts", code="server-died", got=server.fault,
                                      who=server.name, fix=f"look at {log}, or raise --max-engine-restarts")
            server.restarts += 1
            try:
                await launch(server, self._config)
            except EngineError as error:  # the memory of the one that died may not be free yet
                if error.code != "server-start-failed" or server.restarts >= most:
                    raise
                server.fault, server.announced = None, False
                await self._lost(server, error.what)
                return  # its watch tries again
        while not server.alive:  # not started by us: whoever waits for an answer has a timeout of their own
            with suppress(EngineError):
                await attach(server, self._config, self._options.health_check_timeout)
            await asyncio.sleep(LOOK)
        self.event("engine_restarted", engine=server.name, restarts=server.restarts,
                   text=f"{server.name} serves again, restart {server.restarts}")
        if self.serving:
            await self._route_again()
        self.admit()

    async def _has(self, server: Server, version: int, flush: bool) -> bool:
        try:
            reported = (await server.client.model_info()).get("weight_version")
            right = str(reported) == str(version)
            if right and flush:
                await server.client.flush()
        except MilesError as error:
            await asyncio.sleep(LOOK)  # a connection ends before the process does
            if server.alive and (why := await exited(server)) is not None:
                await self._lost(server, why)
            if not server.alive:
                return False
            raise SyncError(f"version {version} is not in use: {error.what}", got=error.got, who=server.name,
                            fix=error.fix, code="server-version-not-served") from error
        if not right:
            raise SyncError(f"the server does not have weights of version {version}", code="server-version-wrong",
                            who=server.name, got=repr(reported), fix="see what its log says about the update")
        return True
