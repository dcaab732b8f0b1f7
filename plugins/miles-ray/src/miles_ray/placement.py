"""Placement "ray": the trainer's ranks and the engines' servers as actors in one placement group.

A bundle is one GPU and one CPU (on a cluster without GPUs, one CPU). A rank takes part of a bundle and a server
another, so that with --colocate both are on the same GPU; Ray's shares only count, nothing is cut.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from miles_core.config.environment import environment, relevant
from miles_core.config.hardware import trainer_gpus
from miles_core.config.tables import RunConfig
from miles_core.errors import ConfigError
from miles_core.hosts import Handle, RankGroup, ThreadHost
from miles_core.stages.placement import Leases, demand, engines, first_engine_gpu, logs
from miles_core.types import NodeSlot, Rank
from miles_ray import cluster
from miles_ray.cluster import Bundle
from miles_ray.host import Actor, RayHost

logger = logging.getLogger(__name__)

RANK, SERVER = 0.4, 0.2
"""Shares of a bundle: an actor, a critic's and a server's fit into one."""


class RayPlacement(Leases):
    """See stages/placement.py for the contract."""

    def __init__(self, config: RunConfig, dashboard: cluster.Dashboard | None = None, *,
                 exclude: Sequence[str] = (), check_nodes: bool = False):
        super().__init__(config)
        self._dashboard, self._exclude, self._check_nodes = dashboard, exclude, check_nodes
        # Names are unique in a namespace, and a cluster may have two runs of one name.
        self._namespace = f"miles-{config.name}-{uuid.uuid4().hex[:8]}"
        self._group, self._bundles, self._actors = None, [], []
        # A thread of its own: Ray's processes die with the thread that started them, and signals stay the loop's.
        self._hold = ThreadHost("ray", Hold)

    async def open(self) -> None:
        exclude = [*self._exclude]
        self._group, self._bundles = await self._take(exclude)
        while self._check_nodes and (bad := await self._bad_nodes()):  # those that come in their place may be bad, too
            exclude += bad
            self._group, self._bundles = await self._take(exclude)
        if threading.current_thread() is threading.main_thread():  # Ray's core has put an abort in its place
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        gpus = self._bundles[0].gpu is not None
        self.environment = {**cluster.VISIBLE, **relevant(), **environment(self.config, gpus=gpus)}

    async def _take(self, exclude: Sequence[str]) -> tuple[Any, list[Bundle]]:
        perf = self.config.perf
        return await self._hold.take(
            max(1, demand(self.config)), perf.ray_address or os.environ.get("RAY_ADDRESS"),
            label_selector(perf.placement_labels), perf.placement_spares, perf.placement_timeout, self._namespace,
            perf.placement_rack_label, self._dashboard, exclude)  # fmt: skip

    async def _bad_nodes(self) -> list[str]:
        from miles_ray.survey import measured

        findings = await measured(self._group, self._bundles)
        for line in findings.table():
            logger.info("%s", line)
        return findings.bad()

    def trainer(self, factory: Callable, *args: object) -> Handle:
        size = trainer_gpus(self.config)
        places = self._bundles[:size]
        actors = [self._actor(place, RANK, f"trainer-rank-{i}") for i, place in enumerate(places)]
        meet = actors[0].meeting_point.remote() if size > 1 else None
        folder, gpus = logs(self.config), places[0].gpu is not None
        hosts = [RayHost(f"trainer rank {i}", actor, factory, (*args, Rank(i, size, place.local, gpu=gpus)), meet=meet,
                         log=folder / f"trainer-rank-{i}.log", plugins=self.config.plugins)
                 for i, (actor, place) in enumerate(zip(actors, places, strict=True))]
        return RankGroup("trainer", hosts)

    def servers(self, factory: Callable, *args: object) -> list[Handle]:
        count, size = engines(self.config)
        first, hosts = first_engine_gpu(self.config), []
        for seat, place in seats(self._bundles[first : first + count * size], size):
            name = f"engine-{seat.engine}" + (f"-node-{seat.node}" if seat.nodes > 1 else "")
            actor = self._actor(place, SERVER, name)
            hosts.append(RayHost(name.replace("-", " "), actor, factory, (*args, seat), plugins=self.config.plugins))
        return hosts

    async def close(self) -> None:
        await self._hold.leave(self._actors)
        await self._hold.close()

    def _actor(self, place: Bundle, share: float, name: str) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        kind = ray.remote(num_cpus=share, num_gpus=0 if place.gpu is None else share, max_restarts=0)(Actor)
        self._actors.append(kind.options(
            name=f"miles-{self.config.name}-{name}", namespace=self._namespace,
            runtime_env={"env_vars": dict(self.environment)},
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=place.index)).remote())
        return self._actors[-1]


class Hold:
    """What this run has of a cluster."""

    def __init__(self) -> None:
        self._joined, self._group = None, None

    def take(self, count: int | None, address: str | None, labels: Mapping[str, str], spares: int, timeout: float,
             name: str, rack_label: str | None, dashboard: cluster.Dashboard | None = None,
             exclude: Sequence[str] = ()) -> tuple[Any, list[Bundle]]:
        """Join the cluster and reserve bundles in place of those it has; see cluster.reserve."""
        from ray.util.placement_group import remove_placement_group

        self._joined = self._joined or cluster.join(address, places=(count or 1) + spares, who="--placement ray",
                                                    dashboard=dashboard)
        if self._group is not None:
            remove_placement_group(self._group)
        self._group = cluster.reserve(count, labels=labels, spares=spares, timeout=timeout, name=name,
                                      alone=self._joined.alone, exclude=exclude)
        return self._group, cluster.bundles(self._group, rack_label)

    def leave(self, actors: Sequence[Any]) -> None:
        """End the actors, give the bundles back, end a Ray of our own."""
        import ray
        from ray.util.placement_group import remove_placement_group

        if self._joined is None or not ray.is_initialized():
            return
        for actor in actors:
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)
        self._joined.leave()


def seats(places: Sequence[Bundle], size: int) -> list[tuple[NodeSlot, Bundle]]:
    """Seats of engines of `size` bundles each, engine after engine and node after node, and where their hosts go.

    Raises:
        ConfigError: an engine's nodes would hold different numbers of its GPUs.
    """
    placed = []
    for engine, begin in enumerate(range(0, len(places), size)):
        mine = places[begin : begin + size]
        nodes = [list(group) for _, group in itertools.groupby(mine, key=lambda place: place.host)]
        if len({len(node) for node in nodes}) > 1:
            shares = ", ".join(f"{len(node)} on {node[0].host}" for node in nodes)
            raise ConfigError(f"engine {engine} would be split unevenly over nodes", code="engine-split-unevenly",
                              got=shares, who="--placement ray",
                              fix="choose sizes of trainer and engines that divide a node's GPUs")
        for index, node in enumerate(nodes):
            gpus = tuple(place.gpu for place in node if place.gpu is not None)
            placed.append((NodeSlot(engine, index, len(nodes), node[0].host, gpus), node[0]))
    return placed


def label_selector(texts: Sequence[str]) -> dict[str, str]:
    """
    Raises:
        ConfigError: a text that is not KEY=VALUE.
    """
    labels = dict(text.partition("=")[::2] for text in texts)
    if bad := [text for text in texts if "=" not in text]:
        raise ConfigError("a label should be KEY=VALUE", code="placement-label-malformed", got=bad[0],
                          who="--placement-labels", fix=f"{bad[0]}=VALUE")
    return labels
