"""Trainer and engines on GPUs of their own: the first trainer rank broadcasts buckets to all ranks of all engines.

One process group holds the sender as rank 0 and then the engines' ranks, over NCCL, or gloo on a CPU. One request has a
server take all buckets of a sync (miles_weights.receive): it loads one while the next is on its way, where SGLang's own
update_weights_from_distributed does the one after the other. What a bucket holds goes by a key-value store.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait

import torch
import torch.distributed as dist

from miles_core.errors import SyncError
from miles_core.types import Rank
from miles_sglang.server_extension.miles_weights import process_group
from miles_sglang.sync.sender import Meter, Servers, Settings
from miles_sglang.sync.servers import Target, beside, load, plain
from miles_sglang.sync.verify import Ledger

_numbers = itertools.count()


class BroadcastSender:
    """See stages.sync.Sender. The first rank sends; the others only take part in the stream.

    Args:
        targets: servers to bring up to date; all of them are in the group.
    """

    takes_stacks = True

    def __init__(self, settings: Settings, targets: tuple[Target, ...]):
        self.settings, self.targets = settings, targets
        self._servers: Servers | None = None
        self._group: dist.ProcessGroup | None = None
        self._turn = 0
        self._before: dict | None = None  # what the report of the sync before was asked with

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
            raise SyncError("NCCL_CUMEM_ENABLE must be 0 in the trainer for weight broadcasts, as in SGLang",
                            got=os.environ.get("NCCL_CUMEM_ENABLE", "unset"), code="nccl-cumem-enabled",
                            fix="start the trainer with NCCL_CUMEM_ENABLE=0")
        self._device = torch.cuda.current_device() if self._backend == "nccl" else None
        self._servers = Servers(self.targets, self.settings)
        for target in filter(self._servers.drafts, self.targets):
            self._servers.load(target, plain({}))  # goes to the draft too, which then takes buckets with its model
        self._name = f"miles-{os.getpid()}-{next(_numbers)}"
        self._group = self._meet()

    def send(self, stream: Iterator[tuple[str, torch.Tensor]], version: int) -> dict[str, float]:
        if not self._leads:
            for _ in stream:
                pass
            return {}
        meter, ledger, reports, self._turn = Meter(), Ledger(), self._servers.reports, self._turn + 1
        key, timeout = f"buckets/{self._turn}", self.settings.timeout
        plan = {"receive": {"name": self._name, "store": reports.store, "key": key, "seconds": timeout}}
        plans, requests, before = [plan] * len(self.targets), None, self._before
        if before is not None:  # a report with the last bucket spares a call of its own
            requests = [{"store": reports.store, "key": f"with {key}/{i}", **before} for i in range(len(self.targets))]
            plans = [{**plan, "report": one} for one in requests]
        taking = [beside(lambda target=target, plan=plan: load(target, plain(plan), timeout=timeout))
                  for target, plan in zip(self.targets, plans, strict=True)]
        sending = beside(lambda: self._carry(stream, key, ledger))
        _together(sending, taking, self.targets, timeout, "taken all buckets")
        self._before = ledger.expectation()
        return meter.figures(ledger, self._servers.verify(ledger, requests if before == self._before else None))

    def close(self) -> None:
        """The group is left on both sides; a server that is gone has left it."""
        if self._group is None:
            return
        group, self._group = self._group, None
        leaving = [beside(lambda target=target: load(target, plain({"leave": self._name}), timeout=10))
                   for target in self.targets]
        leaving.append(beside(lambda: dist.destroy_process_group(group)))
        wait(leaving, timeout=10)

    def _meet(self) -> dist.ProcessGroup:
        """The group; every server joins in a request of its own while this process waits for them."""
        timeout, address = self.settings.timeout / 4, self._servers.reports.address
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        size = 1 + sum(target.size for target in self.targets)
        offsets = itertools.accumulate((target.size for target in self.targets), initial=1)
        method = f"tcp://{address}:{port}"
        joining = [beside(lambda target=target, offset=offset: self._join(target, method, size, offset, timeout))
                   for target, offset in zip(self.targets, offsets, strict=False)]
        group = beside(lambda: process_group(self._backend, method, 0, size, self._name, timeout))
        return _together(group, joining, self.targets, timeout, f"joined the {self._backend} group of {size} ranks at "
                         f"{address}:{port}")

    def _join(self, target: Target, method: str, size: int, offset: int, timeout: float) -> None:
        """Have a server's ranks join; what went wrong there its report says."""
        member = {"name": self._name, "backend": self._backend, "method": method, "size": size, "offset": offset,
                  "seconds": 2 * timeout}  # who is late is named here first
        self._servers.reports.ask(target, timeout, {"join": member}, names_only=True)

    def _carry(self, stream: Iterator[tuple[str, torch.Tensor]], key: str, ledger: Ledger) -> None:
        """Broadcast bucket after bucket; what each holds goes by the store, an empty list after the last."""
        if self._device is not None:
            torch.cuda.set_device(self._device)  # of this thread
        works: list = [None, None]
        reports, count = self._servers.reports, 0
        try:
            for bucket in self.settings.cutter(before=lambda turn: works[turn] and works[turn].wait())(
                    self.settings.stream(stream, self._servers.names)):
                reports.put(f"{key}/{count}", bucket.tensors)
                works[count % 2] = dist.broadcast(bucket.flat, 0, group=self._group, async_op=True)
                ledger.add(bucket.views())
                count += 1
        finally:
            reports.put(f"{key}/{count}", [])
        for work in works:
            if work is not None:
                work.wait()
        if self._device is not None:
            torch.cuda.current_stream().synchronize()
        ledger.total()  # before the answers: the servers load and add up


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
    raise SyncError(f"{', '.join(late) or 'the trainer'} had not {what} within {timeout:g} s", code="broadcast-timeout",
                    got=None if cause is None else str(cause)[:300],
                    fix="look at the engine's log; its hosts and the trainer's have to reach each other")
