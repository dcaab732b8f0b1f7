"""Trainer ranks and engine ranks that share GPUs: a handle of each rank's bucket goes by HTTP, the bytes stay.

Every trainer rank has the whole stream, so it fills a bucket in its GPU's memory. The ranks on one engine's GPUs hand
the handles of theirs to the first of them, which posts them; each engine rank opens its own and loads. On a CPU, where
memory has no such handle, the bytes travel.
"""

from __future__ import annotations

import base64
import io
import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler

import torch
import torch.distributed as dist
from miles_local.buckets import Bucket
from torch.multiprocessing import reductions

from miles_core.errors import SyncError
from miles_core.types import Rank
from miles_sglang.sync.sender import Meter, Servers, Settings
from miles_sglang.sync.servers import Target, beside, for_all, plain
from miles_sglang.sync.verify import Ledger


class IpcSender:
    """See stages.sync.Sender.

    Args:
        targets: servers to bring up to date. With GPUs, engine e sits on those of the trainer ranks from e x size on;
            without, the first rank sends to all.
    """

    takes_stacks = True

    def __init__(self, settings: Settings, targets: tuple[Target, ...]):
        self.settings, self.targets = settings, targets
        self._group: dist.ProcessGroup | None = None
        self._servers: Servers | None = None
        self._turn = 0
        self._before: tuple[int, dict] | None = None  # buckets of the sync before, and what its report was asked with

    def open(self, rank: Rank) -> None:
        """
        Raises:
            SyncError: a server that cannot be reached, or that sits on other GPUs than the trainer.
        """
        self._ranks, mine = (0,), None
        for target in self.targets:
            ranks = tuple(range(target.engine * target.size, (target.engine + 1) * target.size))
            if not target.gpus:
                continue
            if ranks[-1] >= rank.size:
                raise SyncError(f"{target.name} runs on GPUs that no trainer rank uses", code="ipc-gpus-without-rank",
                                got=list(target.gpus),
                                fix="use --weight-sync broadcast, or as many trainer ranks as GPUs of engines")
            group = dist.new_group(ranks, timedelta(seconds=self.settings.timeout), "gloo") if len(ranks) > 1 else None
            if rank.index in ranks:
                self._ranks, self._group, mine = ranks, group, target
                _same_gpu(target, ranks.index(rank.index))
        self._shares = mine is not None
        self._leads = rank.index == self._ranks[0] and (self._shares or not self.targets[0].gpus)
        shared: list = [frozenset(), None]
        if self._leads:
            self._servers = Servers((mine,) if self._shares else self.targets, self.settings)
            # A draft model is loaded by the same requests, and would answer in the target's place.
            drafted = any(map(self._servers.drafts, self._servers.targets))
            shared = [self._servers.names, None if drafted else self._servers.reports.store]
        if self._group is not None:  # all of them have to send the same
            dist.broadcast_object_list(shared, self._ranks[0], group=self._group)
        self._names, self._store = shared

    def send(self, stream: Iterator[tuple[str, torch.Tensor]], version: int) -> dict[str, float]:
        if not (self._leads or self._shares):
            for _ in stream:
                pass
            return {}
        meter, ledger, under_way, bucket, count, request = Meter(), Ledger(), None, None, 0, None
        self._turn += 1
        for bucket in self.settings.cutter()(self.settings.stream(stream, self._names)):
            if under_way is not None:
                under_way.result()
            count, request = count + 1, self._request(count + 1)
            packed = self._gathered(bucket, request)  # the others wait here for the answer to the bucket before
            if self._leads:
                under_way = self._post(packed)
            ledger.add(bucket.views(), sums_too=self._leads)
        ledger.total()  # before the answer: the servers load and add up
        before, self._before = self._before, (count, ledger.expectation())
        early = [request] if self._leads and request and before == self._before else None
        if under_way is not None and early is None:
            under_way.result()
        verified = self._servers.verify(ledger, early, under_way) if self._leads else {}
        if under_way is not None:
            under_way.result()
        self._gathered(None)
        del bucket
        figures = meter.figures(ledger, verified) if self._leads else {}
        _give_back()
        return figures

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
        self._group = self._servers = None

    def _post(self, packed: list[str]) -> Future:
        """Hand a bucket to the servers while the next one is filled."""
        servers, each, sent = self._servers, packed if self._shares else packed[0], threading.Event()
        under_way = beside(lambda: for_all(servers.targets, lambda target: servers.load(target, each, sent.set)))
        if self._shares:  # a handle is sent at once, unless what this thread does next keeps the interpreter to itself
            under_way.add_done_callback(lambda _: sent.set())
            sent.wait()
        return under_way

    def _request(self, count: int) -> dict | None:
        """For a report with the bucket that was the last one in the sync before: it spares a call of its own."""
        one = self._shares or len(self.targets) == 1  # a report has one place to go to
        if not one or self._store is None or self._before is None or count != self._before[0]:
            return None
        return {"store": self._store, "key": f"with the bucket/{self._turn}", **self._before[1]}

    def _gathered(self, bucket: Bucket | None, report: dict | None = None) -> list[str]:
        """What the ranks of this engine send, in their order; on the first rank. None only meets the others."""
        own = None if bucket is None else pack(bucket, report)
        if self._group is None:
            return [own]
        parts = [None] * len(self._ranks) if self._leads else None
        dist.gather_object(own, parts, self._ranks[0], group=self._group)
        return parts


def pack(bucket: Bucket, report: dict | None = None) -> str:
    """A bucket as `update_weights_from_tensor` takes it: on a GPU a handle of its memory."""
    plan = {"tensors": bucket.tensors, **({} if report is None else {"report": report})}
    if not bucket.flat.is_cuda:
        return plain(plan, bucket.flat)
    buffer = io.BytesIO()
    pickler = ForkingPickler(buffer)
    pickler.dispatch_table[torch.Tensor] = _by_uuid
    pickler.dump([(json.dumps(plan), bucket.flat)])
    return base64.b64encode(buffer.getvalue()).decode()


def _by_uuid(tensor: torch.Tensor) -> tuple:
    """torch's own reduction, with the GPU's UUID for its number: processes see GPUs under other numbers.

    SGLang's side understands both (sglang/srt/utils/patch_torch.py).
    """
    rebuild, arguments = reductions.reduce_tensor(tensor)
    device = 6
    uuid = str(torch.cuda.get_device_properties(arguments[device]).uuid)
    return rebuild, (*arguments[:device], uuid, *arguments[device + 1 :])


def _same_gpu(target: Target, position: int) -> None:
    """
    Raises:
        SyncError: this rank's GPU is not that of the engine's rank.
    """
    if not torch.cuda.is_available():
        return
    visible, here = os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.current_device()
    number = visible.split(",")[here].strip() if visible else str(here)
    if number.isdecimal() and int(number) != target.gpus[position]:
        raise SyncError(f"rank {position} of {target.name} is on GPU {target.gpus[position]} and the trainer's rank "
                        f"beside it on GPU {number}",
                        code="ipc-gpus-misaligned", fix="use --weight-sync broadcast, or place them on the same GPUs")


def _give_back() -> None:
    """The buckets' memory goes back to the device: the engine takes its caches next."""
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
