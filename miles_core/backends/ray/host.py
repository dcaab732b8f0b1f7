"""Ray actors as hosts of a trainer's ranks: the same handle as a thread's and a process's.

With RAY_ADDRESS set, or on a machine of a running cluster, the ranks go there; else Ray starts on this machine and ends
with the run.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable
from typing import Any

from miles_core.errors import ConfigError, DiedError
from miles_core.hosts import Handle, RankGroup, answer, in_daemon_thread, unpacked
from miles_core.types import Rank

START_TIMEOUT = 120.0
"""Seconds that Ray may take to place an actor and import what it runs."""


class Actor:
    """Lives in the Ray worker; one call at a time."""

    def __init__(self) -> None:
        self._hosted: Any = None
        self._failure: BaseException | None = None
        self._store: Any = None

    def meeting_point(self) -> str:
        """Serve the store by which the ranks find one another, on a port that is free; ask the first rank only."""
        import ray
        import torch.distributed as dist

        host = ray.util.get_node_ip_address()
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return f"tcp://{host}:{self._store.port}"

    def make(self, folder: str, factory: Callable, args: tuple) -> None:
        """Make the hosted object, in the driver's folder where there is one; its error is every later call's."""
        if os.path.isdir(folder):  # paths of a run file are relative to it
            os.chdir(folder)
        try:
            self._hosted = factory(*args)
        except BaseException as error:  # noqa: BLE001 - whatever it is, every call raises it
            self._failure = error

    def ask(self, method: str, args: tuple) -> tuple:
        return answer(self._hosted, self._failure, method, args)


class RayHost(Handle):
    """An object in a Ray actor.

    Args:
        actor: of class Actor.
        factory, args: what the actor makes first.
    """

    def __init__(self, name: str, actor: Any, factory: Callable, args: tuple):
        super().__init__(name)
        self._actor = actor
        self._made = actor.make.remote(os.getcwd(), factory, args)
        self._turn = asyncio.Lock()

    async def call(self, method: str, *args: object) -> Any:
        import ray

        async with self._turn:
            try:
                found = await in_daemon_thread(lambda: ray.get([self._made, self._actor.ask.remote(method, args)])[1])
            except ray.exceptions.RayError as error:
                raise DiedError(f"the Ray actor of {self._name} died in {method}()", got=str(error).splitlines()[0],
                                fix="look at its log in Ray's session folder; often a lack of memory") from None
        return unpacked(self._name, *found)

    async def close(self) -> None:
        self.kill()

    def kill(self) -> None:
        import ray

        if ray.is_initialized():
            ray.kill(self._actor)


def ray_group(name: str, ranks: int, factory: Callable, *args: object) -> Handle:
    """A Ray actor for each rank; `factory(*args, rank)` is made in each.

    Raises:
        ConfigError: Ray is not installed, or the cluster has no room for the ranks within START_TIMEOUT.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError("--trainer-host ray needs Ray", fix="pip install 'miles-core[ray]'") from None
    ours, address = not ray.is_initialized(), os.environ.get("RAY_ADDRESS")
    if ours:
        # A Ray of our own has as many places as there are ranks, whatever the CPUs; a cluster has its own.
        own = {} if address else {"num_cpus": ranks, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        ray.init(address=address, log_to_driver=False, configure_logging=False, **own)
    remote = ray.remote(num_cpus=1, max_restarts=0)(Actor)
    actors = [remote.options(name=f"{name} rank {i} of {os.getpid()}").remote() for i in range(ranks)]
    folder = tempfile.TemporaryDirectory(prefix="miles-")
    at = f"file://{folder.name}/ranks" if ours and not address else None  # on one machine nothing has to listen
    try:
        at = at or ray.get(actors[0].meeting_point.remote(), timeout=START_TIMEOUT)
    except ray.exceptions.GetTimeoutError:
        raise ConfigError(f"Ray placed no trainer rank within {START_TIMEOUT:g} s", who="--trainer-host ray",
                          got=f"{ray.available_resources().get('CPU', 0):g} CPUs free for {ranks} ranks",
                          fix="free some, or ask for fewer ranks") from None
    hosts = [RayHost(f"{name} rank {i}", actor, factory, (*args, Rank(i, ranks, i, at)))
             for i, actor in enumerate(actors)]

    def release() -> None:
        folder.cleanup()
        if ours:
            ray.shutdown()

    return RankGroup(name, hosts, release)
