"""Ray actors as hosts: the same handle as a thread's and a process's.

`ray_group` is for commands that want a few processes; a run's ranks and servers are placed by placement.py.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.errors import ConfigError, DiedError, TrainError
from miles_core.hosts import Handle, Instance, RankGroup, in_daemon_thread, meeting_folder, unpacked, write_to
from miles_core.messages import Message, answered, unpickled
from miles_core.types import Rank
from miles_ray import cluster, versions

START_TIMEOUT = 120.0
"""Seconds that Ray may take to place an actor and import what it runs."""


class Actor:
    """Lives in the Ray worker; one call at a time."""

    def __init__(self) -> None:
        self._store: Any = None
        self._memory = memoryview(b"")

    def meeting_point(self) -> str:
        """Serve the store by which the ranks find one another, on a port that is free; ask the first rank only."""
        import ray
        import torch.distributed as dist

        host = ray.util.get_node_ip_address()
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return f"tcp://{host}:{self._store.port}"

    def make(self, folder: str, log: Path | None, plugins: Sequence[str], factory: Callable, args: tuple,
             meet: str | None) -> dict[str, str]:
        """Make the hosted object, in the driver's folder where there is one; its error is every later call's.

        Args:
            log: takes what the actor prints, where its folder is shared; else Ray's own log does.
            meet: where the ranks meet, for a last argument that is a Rank without a rendezvous.

        Returns:
            what is installed here.
        """
        if os.path.isdir(folder):  # paths of a run file are relative to it
            os.chdir(folder)
        if log is not None and log.parent.is_dir():
            write_to(log)
        *others, last = args
        if isinstance(last, Rank) and last.rendezvous is None:
            last = replace(last, rendezvous=meet)
        self._hosted = Instance(factory, (*others, last))
        return versions.here(plugins)

    def ask(self, method: str, packed: Packed) -> tuple[bytes, list[tuple[int, int]]]:
        """Call the hosted object; its arguments' arrays stay in the object store of this node, where it reads them."""
        body, spans, memory = packed
        self._memory = memoryview(memory) if memory.size else self._memory
        result, error, trace = self._hosted.answer(method, unpickled(body, spans, self._memory))
        if isinstance(result, list):
            result = [tuple(map(_by_itself, one)) if isinstance(one, tuple) else one for one in result]
        return answered((result, error, trace), self._memory, _pickled)

    def finish(self) -> None:
        """Let the hosted object leave groups and connections."""
        self._hosted.close()


Packed = tuple[bytes, list[tuple[int, int]], np.ndarray]
"""Body and spans of a message, and its memory [bytes] uint8."""


def _pickled(content: Any, callback: Callable) -> bytes:
    import ray

    return ray.cloudpickle.dumps(content, protocol=5, buffer_callback=callback)


def _by_itself(value: Any) -> Any:
    """A tensor without what it is a part of, which would be pickled with it: the trainer's are views of one buffer."""
    import torch

    part = isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() > value.nbytes
    return value.clone() if part else value


class RayHost(Handle):
    """An object in a Ray actor.

    Args:
        actor: of class Actor.
        factory, args: what the actor makes first.
        log: where it writes what it prints.
        plugins: those of the run, to be compared with what is installed there.
        meet: a reference to where the ranks meet.
    """

    def __init__(self, name: str, actor: Any, factory: Callable, args: tuple, *, log: Path | None = None,
                 plugins: Sequence[str] = (), meet: Any = None):
        super().__init__(name)
        self._actor, self._log, self._plugins, self._alike = actor, log, plugins, False
        self._made = actor.make.remote(os.getcwd(), log, plugins, factory, args, meet)
        self._turn = asyncio.Lock()
        self._memory = memoryview(b"")

    def pack(self, args: tuple[object, ...]) -> Any:
        """A message, of which the object store has one copy for each node, whatever the number of ranks there.

        Raises:
            TrainError: the object store does not take it.
        """
        import ray

        message = Message(args, _pickled)
        try:
            return ray.put((message.body, message.spans, np.frombuffer(message.memory, np.uint8)))
        except ray.exceptions.RayError as error:
            raise TrainError("Ray's object store does not take the arguments of a call", code="ray-object-store-full",
                             got=f"{len(message.memory)} bytes: {str(error).splitlines()[0]}", who=self._name,
                             fix="free memory in /dev/shm and disk under Ray's --temp-dir, or start Ray with a larger "
                                 "--object-store-memory") from error

    async def call(self, method: str, *args: object) -> Any:
        return await self.deliver(method, args)

    async def deliver(self, method: str, args: Any) -> Any:
        import ray

        def ask() -> tuple[dict[str, str], Any]:
            packed = self.pack(args) if isinstance(args, tuple) else args
            (*_, memory), installed, reply = ray.get([packed, self._made, self._actor.ask.remote(method, packed)])
            self._memory = memoryview(memory) if memory.size else self._memory
            return installed, unpickled(*reply, self._memory)

        async with self._turn:
            try:
                installed, result = await in_daemon_thread(ask)
            except ray.exceptions.RayError as error:
                log = "its log in Ray's session folder" if self._log is None else f"the end of {self._log}"
                raise DiedError(f"the Ray actor of {self._name} died in {method}()", got=str(error).splitlines()[0],
                                fix=f"look at {log}; often a lack of memory", code="ray-actor-died") from None
        if not self._alike:
            versions.check(self._name, versions.here(self._plugins), installed)
            self._alike = True
        return unpacked(self._name, *result)

    async def close(self) -> None:
        """Ask it to finish, for seconds, then end it."""
        import ray

        if ray.is_initialized() and not self._turn.locked():
            done = self._actor.finish.remote()
            await in_daemon_thread(lambda: ray.wait([done], timeout=5))
        self.kill()

    def kill(self) -> None:
        import ray

        if ray.is_initialized():
            ray.kill(self._actor)


def ray_group(name: str, ranks: int, factory: Callable, *args: object) -> Handle:
    """A Ray actor for each rank; `factory(*args, rank)` is made in each.

    With RAY_ADDRESS set the ranks go to that cluster; else Ray starts on this machine and ends with them.

    Raises:
        ConfigError: Ray is not installed, or the cluster has no room for the ranks within START_TIMEOUT.
    """
    joined = cluster.join(os.environ.get("RAY_ADDRESS"), places=ranks, who="--host ray")
    import ray

    remote = ray.remote(num_cpus=1, max_restarts=0)(Actor)
    actors = [remote.options(name=f"{name} rank {i} of {os.getpid()}").remote() for i in range(ranks)]
    folder = meeting_folder()
    at = f"file://{folder.name}/ranks" if joined.alone else None  # on one machine nothing has to listen
    try:
        at = at or ray.get(actors[0].meeting_point.remote(), timeout=START_TIMEOUT)
    except ray.exceptions.GetTimeoutError:
        raise ConfigError(f"Ray placed no rank within {START_TIMEOUT:g} s", who="--host ray",
                          got=f"{ray.available_resources().get('CPU', 0):g} CPUs free for {ranks} ranks",
                          fix="free some resources, or ask for fewer ranks", code="ray-placement-timeout") from None
    hosts = [RayHost(f"{name} rank {i}", actor, factory, (*args, Rank(i, ranks, i, at)))
             for i, actor in enumerate(actors)]

    def release() -> None:
        folder.cleanup()
        joined.leave()

    return RankGroup(name, hosts, release)
