"""A Ray cluster: joining it, reserving bundles of one GPU and one CPU each, and saying what does not fit."""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles_core.errors import ConfigError
from miles_core.hosts import cpus

VISIBLE = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
"""Every process sees all GPUs of its node and is told its number: peers in one node need to see one another."""

_OF_DASHBOARD = ("aiohttp", "aiohttp_cors", "opencensus", "prometheus_client")
"""Packages of ray[default] that its dashboard imports."""

LOOK_TIMEOUT = 120.0
"""Seconds in which every node has to start a process that says where it is."""

TOKEN = ("for a cluster that wants a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN, or have the token in "
         "~/.ray/auth_token")
"""Part of a remedy: a cluster that refuses a token looks to Ray like one that is not there."""


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Dashboard:
    """Where Ray's dashboard listens."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Joined:
    """A connection to a cluster.

    Args:
        ours: whether it was made here, so that it ends here.
        alone: whether the cluster itself is ours: one machine, loopback only.
    """

    ours: bool
    alone: bool

    def leave(self) -> None:
        import ray

        if self.ours:
            ray.shutdown()


@dataclass(frozen=True, slots=True)
class Bundle:
    """One place of a placement group.

    Args:
        index: in the group.
        host: address of its node.
        gpu: the GPU's number on the node as CUDA_VISIBLE_DEVICES counts; None on a CPU.
        local: the same among the GPUs that processes there see; on a CPU the place's number on the node.
        rack: value of the rack's label, "" without one.
    """

    index: int
    host: str
    gpu: int | None
    local: int
    rack: str = ""


def join(address: str | None, *, places: int, who: str, dashboard: Dashboard | None = None) -> Joined:
    """Use the Ray that this process is connected to, the cluster at an address, or one of our own on this machine.

    Args:
        dashboard: of one of our own.

    Raises:
        ConfigError: Ray or what its dashboard needs is not installed, nothing answers at the address, or
            the cluster does not take our token.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError(f"{who} needs Ray", code="ray-not-installed", fix="pip install 'miles-ray'") from None
    if ray.is_initialized():
        return Joined(ours=False, alone=False)
    logging.getLogger("ray").setLevel(logging.ERROR)  # what it says at every start is of no use here
    # A Ray of our own has as many places as are needed, whatever the CPUs; a cluster has its own.
    own = {} if address else {"num_cpus": max(places, cpus()), "_node_ip_address": "127.0.0.1", **_shown(dashboard)}
    try:
        _reach(address)
        context = ray.init(address=address, log_to_driver=False, configure_logging=False, **own)
    except (OSError, RuntimeError, ValueError, ray.exceptions.AuthenticationError) as error:
        raise ConfigError("cannot connect to the Ray cluster", who=f"Ray at {address or 'this machine'}",
                          got=str(error).splitlines()[0].partition(". ")[0], code="ray-unreachable",
                          fix="start one with ray start --head, or leave the address out to start one here; "
                              f"{TOKEN}") from None
    if dashboard is not None and context.dashboard_url:
        logger.info("Ray's dashboard: http://%s", context.dashboard_url)
    return Joined(ours=True, alone=not address)


def _shown(dashboard: Dashboard | None) -> dict[str, object]:
    """Arguments of ray.init.

    Raises:
        ConfigError: a package that the dashboard needs is not installed; Ray would start without it, unsaid.
    """
    if dashboard is None:
        return {"include_dashboard": False}
    if missing := [name for name in _OF_DASHBOARD if importlib.util.find_spec(name) is None]:
        raise ConfigError("Ray's dashboard needs packages that are not installed", got=", ".join(missing),
                          who="--ray.dashboard", fix="pip install 'ray[default]'", code="ray-dashboard-not-installed")
    return {"include_dashboard": True, "dashboard_host": dashboard.host, "dashboard_port": dashboard.port}


def _reach(address: str | None) -> None:
    """Connect to HOST:PORT, and leave again: Ray itself tries for many minutes.

    Raises:
        OSError: no process listens there, or none answers within 10 s.
    """
    host, _, port = (address or "").rpartition(":")
    if host and port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=10).close()


def reserve(count: int | None, *, labels: Mapping[str, str], spares: int, timeout: float, name: str, alone: bool,
            exclude: Collection[str] = ()) -> Any:
    """A placement group of `count` bundles packed on as few nodes as possible, and up to `spares` more.

    Args:
        count: None for all that fit.
        exclude: addresses of nodes to leave out.

    Raises:
        ConfigError: it did not become ready; says which bundle does not fit and what the cluster has.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    bundle = {"GPU": 1, "CPU": 1} if ray.cluster_resources().get("GPU") else {"CPU": 1}

    def room() -> int:
        return capacity(nodes(exclude), bundle, labels)

    count = count or max(1, room())
    if alone and room() < count:  # nothing can join it
        raise too_small(count, bundle, labels, exclude, timeout=None)
    end = time.monotonic() + timeout
    while True:
        total = count + max(0, min(spares, room() - count))
        selector = {**labels, **_without(exclude)}
        selectors = {"bundle_label_selector": [selector] * total} if selector else {}
        group = placement_group([bundle] * total, strategy="PACK", name=name, **selectors)
        ready = group.ready()
        while not ray.wait([ready], timeout=min(2.0, max(0.0, end - time.monotonic())))[0]:
            if time.monotonic() >= end:
                remove_placement_group(group)
                raise too_small(count, bundle, labels, exclude, timeout)
            if count < total and room() < total:  # a node was lost that was counted on
                remove_placement_group(group)
                break
        else:
            return group


def nodes(exclude: Collection[str] = ()) -> list[dict]:
    """Nodes that are alive, as Ray describes them, but for those with these addresses."""
    import ray

    return [node for node in ray.nodes() if node["Alive"] and node["NodeManagerAddress"] not in exclude]


def _without(exclude: Collection[str]) -> dict[str, str]:
    """A label selector that leaves these nodes out; Ray labels a node with its id and not with its address."""
    left_out = [node["NodeID"] for node in nodes() if node["NodeManagerAddress"] in exclude]
    return {"ray.io/node-id": f"!in({', '.join(left_out)})"} if left_out else {}


def capacity(alive: Sequence[Mapping], bundle: Mapping[str, float], labels: Mapping[str, str]) -> int:
    """How many bundles fit on nodes with these labels when nothing else runs."""
    fitting = [node for node in alive if labels.items() <= node.get("Labels", {}).items()]
    return sum(min(int(node["Resources"].get(kind, 0) // size) for kind, size in bundle.items()) for node in fitting)


def too_small(count: int, bundle: Mapping[str, float], labels: Mapping[str, str], exclude: Collection[str],
              timeout: float | None) -> ConfigError:
    """The error that says which bundle does not fit."""
    import ray

    alive = nodes(exclude)
    room = capacity(alive, bundle, labels)
    what = " and ".join(f"{size} {kind}" for kind, size in bundle.items())
    what += f" on a node with {', '.join(f'{key}={value}' for key, value in labels.items())}" if labels else ""
    has = "; ".join([f"{node['NodeManagerAddress']}: {_amounts(node['Resources'])}" for node in alive] + (
        [f"left out: {', '.join(exclude)}"] if exclude else []))
    if room < count:
        text = f"bundle {room + 1} of {count} ({what}) does not fit into the Ray cluster"
        fix = "add nodes, or ask for fewer GPUs: --actor-num-nodes, --actor-num-gpus-per-node, --rollout-num-gpus"
    else:
        text = f"{count} bundles ({what} each) were not free within {timeout:g} s"
        has = f"free: {_amounts(ray.available_resources())}; of {has}"
        fix = "wait for the other jobs, or raise --placement-timeout"
    return ConfigError(text, code="ray-cluster-too-small", got=has, who="--placement ray", fix=fix)


def bundles(group: Any, rack_label: str | None) -> list[Bundle]:
    """The bundles of a group, ordered by rack, node and GPU: neighbouring ranks are neighbours in the machine.

    Raises:
        ConfigError: a node does not answer within LOOK_TIMEOUT.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    on_gpus = "GPU" in group.bundle_specs[0]
    look = ray.remote(num_cpus=0.1, num_gpus=0.1 if on_gpus else 0, max_retries=0,
                      runtime_env={"env_vars": VISIBLE})(_look)
    pending = [look.options(scheduling_strategy=PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=index)).remote() for index in range(group.bundle_count)]
    try:
        places = ray.get(pending, timeout=LOOK_TIMEOUT)
    except (ray.exceptions.GetTimeoutError, ray.exceptions.RayError) as error:
        raise ConfigError("a node of the Ray cluster does not start processes", who="--placement ray",
                          got=str(error).splitlines()[0], fix="look at `ray status`, and at the nodes' disks and "
                          "memory", code="ray-node-cannot-start") from None
    racks = {node["NodeID"]: node.get("Labels", {}).get(rack_label or "", "") for node in nodes()}
    seen: dict[str, int] = {}
    ordered = []
    for index, (node, host, gpu, local) in sorted(
            enumerate(places), key=lambda item: (racks.get(item[1][0], ""), _octets(item[1][1]), item[1][0],
                                                -1 if item[1][2] is None else item[1][2], item[0])):
        place = seen[node] = seen.get(node, -1) + 1
        ordered.append(Bundle(index, host, gpu, place if gpu is None else local, racks.get(node, "")))
    return ordered


def _look() -> tuple[str, str, int | None, int]:
    """Where this bundle is: node, host, GPU as CUDA_VISIBLE_DEVICES counts and as a process there counts."""
    import ray

    context, ids = ray.get_runtime_context(), ray.get_gpu_ids()
    host = ray.util.get_node_ip_address()
    if not ids:
        return context.get_node_id(), host, None, 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    local = visible.split(",").index(str(ids[0])) if visible else int(ids[0])
    return context.get_node_id(), host, int(ids[0]), local


def _octets(host: str) -> tuple:
    parts = host.split(".")
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else (host,)


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(kind, 0):g} {kind}s" for kind in ("GPU", "CPU"))
