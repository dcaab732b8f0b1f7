"""Trainer and engines on GPUs of their own: the first trainer rank broadcasts buckets to all ranks of all engines.

One process group holds the sender as rank 0 and then the engines' ranks, over NCCL, or gloo on a CPU. Servers receive
a bucket in an HTTP request (SGLang's `flattened_bucket`) that names its tensors, while the bytes come by the group.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from miles_core.backends.sync.buckets import Bucket
from miles_core.backends.sync.sender import Meter, Servers, Settings
from miles_core.backends.sync.servers import Target, beside, post
from miles_core.backends.sync.verify import Ledger
from miles_core.errors import SyncError
from miles_core.types import Rank

_numbers = itertools.count()


class BroadcastSender:
    """See stages.sync.Sender. The first rank sends; the others only take part in the stream.

    Args:
        targets: servers to bring up to date; all of them are in the group.
    """

    def __init__(self, settings: Settings, targets: tuple[Target, ...]):
        self.settings, self.targets = settings, targets
        self._servers: Servers | None = None
        self._group: dist.ProcessGroup | None = None

    def open(self, rank: Rank) -> None:
        """
        Raises:
            SyncError: a server that cannot be reached, or that did not join the group; it is named.
        """
        self._leads = rank.index == 0
        if not self._leads:
            return
        self._backend = "nccl" if torch.cuda.is_available() else "gloo"
        if self._backend == "nccl" and os.environ.get("NCCL_CUMEM_ENABLE") != "0":
            raise SyncError("NCCL_CUMEM_ENABLE has to be 0 where weights are broadcast from, as SGLang has it",
                            got=os.environ.get("NCCL_CUMEM_ENABLE", "unset"),
                            fix="start the trainer with NCCL_CUMEM_ENABLE=0")
        self._servers = Servers(self.targets, self.settings)
        self._name = f"miles-{os.getpid()}-{next(_numbers)}"
        self._group = self._meet()

    def send(self, stream: Iterator[tuple[str, torch.Tensor]], version: int) -> dict[str, float]:
        if not self._leads:
            for _ in stream:
                pass
            return {}
        meter, ledger, under_way = Meter(), Ledger(), None
        # SGLang lays tensors side by side without room between them.
        for bucket in self.settings.cutter(alignment=1)(self.settings.stream(stream, self._servers.names)):
            if under_way is not None:
                under_way.result()
            under_way = beside(lambda bucket=bucket: self._carry(bucket))
            ledger.add(bucket.views())
        if under_way is not None:
            under_way.result()
        transferred = time.perf_counter()
        return meter.figures(ledger, transferred, self._servers.verify(ledger))

    def close(self) -> None:
        """The group is left on both sides; a server that is gone has left it."""
        if self._group is None:
            return
        group, self._group = self._group, None
        for target in self.targets:
            beside(lambda target=target: post(target, "destroy_weights_update_group", {"group_name": self._name},
                                              timeout=10))
        leaving = beside(lambda: dist.destroy_process_group(group))
        wait([leaving], timeout=10)

    def _meet(self) -> dist.ProcessGroup:
        """The group; every server joins in a request of its own while this process waits for them."""
        timeout, address = self.settings.timeout / 4, self._servers.reports.address
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        size = 1 + sum(target.size for target in self.targets)
        offsets = itertools.accumulate((target.size for target in self.targets), initial=1)
        joining = [
            beside(lambda target=target, offset=offset: post(target, "init_weights_update_group", {
                "master_address": address, "master_port": port, "rank_offset": offset, "world_size": size,
                "group_name": self._name, "backend": self._backend}, timeout=2 * timeout))
            for target, offset in zip(self.targets, offsets, strict=False)
        ]  # fmt: skip
        group = beside(lambda: process_group(self._backend, f"tcp://{address}:{port}", size, self._name, timeout))
        return _together(group, joining, self.targets, timeout, f"joined the {self._backend} group of {size} ranks at "
                         f"{address}:{port}")

    def _carry(self, bucket: Bucket) -> None:
        """Broadcast a bucket while the servers wait for it."""
        timeout = self.settings.timeout
        body = {"names": [name for name, *_ in bucket.tensors], "dtypes": [dtype for _, dtype, *_ in bucket.tensors],
                "shapes": [shape for _, _, shape, _ in bucket.tensors], "group_name": self._name,
                "load_format": "flattened_bucket", "flush_cache": False}
        taking = [beside(lambda target=target: post(target, "update_weights_from_distributed", body,
                                                    timeout=2 * timeout))
                  for target in self.targets]
        sending = beside(lambda: _broadcast(bucket.flat, self._group))
        _together(sending, taking, self.targets, timeout, "took part in the broadcast")


def _broadcast(flat: torch.Tensor, group: dist.ProcessGroup) -> None:
    if flat.is_cuda:
        torch.cuda.set_device(flat.device)  # of this thread
    dist.broadcast(flat, 0, group=group)
    if flat.is_cuda:
        torch.cuda.current_stream().synchronize()


def _together(ours: Future, theirs: Sequence[Future], targets: Sequence[Target], timeout: float, what: str):
    """Wait for our part of something collective and for the servers' answers; the result of ours.

    The first failure ends the wait, and so does the time, before that of the requests themselves: whoever still waits
    for the others does so in threads that keep nothing alive.

    Raises:
        SyncError: a server's own, or one that names those that did not answer in time.
    """
    wait([ours, *theirs], timeout, FIRST_EXCEPTION)
    if ours.done() and ours.exception() is not None:
        wait(theirs, 2.0, FIRST_EXCEPTION)  # what a server says tells more
    for future in theirs:
        if future.done():
            future.result()
    if ours.done() and all(future.done() for future in theirs):
        return ours.result()
    late = [target.name for target, future in zip(targets, theirs, strict=True) if not future.done()]
    cause = ours.exception() if ours.done() else None
    raise SyncError(f"{', '.join(late) or 'the trainer'} has not {what} within {timeout:g} s",
                    got=None if cause is None else str(cause)[:300],
                    fix="look at the engine's log; its hosts and the trainer's have to reach each other")


def process_group(backend: str, method: str, size: int, name: str, timeout: float) -> dist.ProcessGroup:
    """Rank 0 of a group beside the default one, met as SGLang's ranks meet it (init_custom_process_group there)."""
    limit = timedelta(seconds=timeout)
    store, rank, size = next(c10d.rendezvous(method, 0, size, timeout=limit))
    store.set_timeout(limit)
    group, _ = c10d._new_process_group_helper(size, rank, [], c10d.Backend(backend), c10d.PrefixStore(name, store),
                                              group_name=name, timeout=limit)
    c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}
    return group
