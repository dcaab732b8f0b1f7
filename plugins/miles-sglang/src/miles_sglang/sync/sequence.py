"""The order of a sync with SGLang servers, whatever carries the bytes.

pause -> transfer -> verify -> version -> confirm (which empties the cache of an idle server) -> resume. A server is not
routable from the pause until it is confirmed. Whatever fails, it stays paused and its version is not set: half-updated
weights never serve.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from miles_core.errors import SyncError
from miles_core.hosts import in_daemon_thread
from miles_sglang.sync.servers import Target, get, post

if TYPE_CHECKING:
    from miles_core.config.tables import RunConfig
    from miles_core.hosts import Handle
    from miles_core.stages.rollout import ServerEngine
    from miles_core.stages.sync import Sender

logger = logging.getLogger(__name__)


class ServerSync:
    """See stages.sync.WeightSync.

    Args:
        sender: targets -> what the trainer's ranks send with.
    """

    def __init__(self, config: RunConfig, sender: Callable[[tuple[Target, ...]], Sender]):
        self._sender = sender
        self._mode, self._timeout = config.rollout.pause_generation_mode, 0.9 * config.perf.weight_sync_timeout
        self._equal = config.perf.check_weight_update_equal
        self._connected: tuple[Target, ...] | None = None

    async def sync(self, trainer: Handle, engine: ServerEngine, version: int) -> dict[str, float]:
        servers = engine.stale(version)
        if not servers:
            await engine.confirm([], version)  # where none lives now, whoever comes back lags behind
            return {"tensors": 0, "bytes": 0}
        begin = time.perf_counter()
        # Servers that lag behind the engine's own version were restarted: they have nothing under way, and the others
        # go on.
        catching_up = engine.version == version
        if not catching_up:
            await engine.pause(self._mode)
            servers = engine.stale(version)  # one that hung was found out by that, and ended: it catches up later
            if not servers:
                await engine.confirm([], version)
                await engine.resume()
                return {"tensors": 0, "bytes": 0}
        targets = tuple(Target.of(server) for server in servers)
        if self._equal:
            await self._scramble(targets)
        await self._connect(trainer, targets, any(server.version == 0 for server in servers))
        paused = time.perf_counter() - begin
        figures = {"pause_s": paused, **await trainer.send(version)}
        if self._equal:
            await self._all(targets, partial(post, path="weights_checker", body={"action": "compare"}))
            logger.info("weight_sync: the engine's weights are what they were before they were overwritten")
            self._equal = False
        await self._all(targets, partial(post, path="update_weight_version",
                                         body={"new_version": str(version), "abort_all_requests": False}))
        await engine.confirm(servers, version)
        if not catching_up:
            await engine.resume()
        words = ", ".join(f"{key} {value:.4g}" for key, value in figures.items())
        logger.info("weight_sync: version %d on %s: %s", version, ", ".join(target.name for target in targets), words)
        return figures

    async def _connect(self, trainer: Handle, targets: tuple[Target, ...], new: bool) -> None:
        """A sender for exactly these servers; another one when one of them is another process than before."""
        if targets == self._connected and not new:
            return
        self._connected = None
        await trainer.connect(self._sender(targets))
        self._connected = targets

    async def _scramble(self, targets: Sequence[Target]) -> None:
        """Keep what the servers hold, and overwrite it: what the trainer sends has to restore every bit.

        Raises:
            SyncError: a server that started with random weights.
        """
        infos = await self._all(targets, partial(get, path="server_info"))
        for target, info in zip(targets, infos, strict=True):
            if info.get("load_format") == "dummy":
                raise SyncError(f"{target.name} started with random weights: there are no weights to compare with",
                                code="nothing-to-compare-with", who="--check-weight-update-equal",
                                fix="add --sglang-load-format auto")
        for action in ("snapshot", "reset_tensors"):
            await self._all(targets, partial(post, path="weights_checker", body={"action": action}))

    async def _all(self, targets: Sequence[Target], ask: Callable) -> list[dict]:
        """Ask all servers at once, beside the event loop."""
        return await asyncio.gather(*(
            in_daemon_thread(partial(ask, target, timeout=self._timeout)) for target in targets))
