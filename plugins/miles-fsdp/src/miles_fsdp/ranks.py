"""Processes that know one another: joining, the mesh that parameters are sharded over, and sums of plain numbers."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from miles_core.types import Rank
from miles_fsdp.context import ALONE, Context


class Ranks:
    """The process group of a trainer. Tensors travel where they lie, Python objects over gloo.

    `data` ranks, of which this is the `data_index`-th, take micro-batches of their own.

    Args:
        timeout: seconds after which a collective that some process does not join is an error.
        context: ranks that share the rows of each micro-batch: those with consecutive numbers.
    """

    def __init__(self, rank: Rank, timeout: float, context: int = 1):
        self.index, self.size = rank.index, rank.size
        self.device = torch.device("cuda", rank.local) if torch.cuda.is_available() else torch.device("cpu")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._joined = not dist.is_initialized()
        if self._joined:
            _join(rank, timeout, "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo")
        self.mesh: DeviceMesh = init_device_mesh(self.device.type, (self.size,))
        self.data, self.data_index = self.size // context, self.index // context
        self.context = ALONE
        if context > 1:
            grid = init_device_mesh(self.device.type, (self.data, context), mesh_dim_names=("data", "context"))
            self.context = Context(self.index % context, context, grid["context"].get_group())
        self._host = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout))

    def gathered(self, value: Any) -> list[Any]:
        """The value of every rank, in their order; on all of them."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._host)
        return values

    def sums(self, values: Mapping[str, float]) -> dict[str, float]:
        """Numbers by name, added up in the order of the ranks, which may have different names."""
        total: dict[str, float] = {}
        for one in self.gathered(dict(values)):
            for name, value in one.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def wait(self) -> None:
        """Until all ranks are here."""
        if self.size > 1:
            dist.barrier(group=self._host)

    def leave(self) -> None:
        """End the process group, if this object has made it."""
        if self._joined and dist.is_initialized():
            dist.destroy_process_group()


def _join(rank: Rank, timeout: float, backend: str) -> None:
    bound: dict[str, Any] = {"backend": backend, "timeout": datetime.timedelta(seconds=timeout)}
    store: Store
    if rank.size == 1:
        dist.init_process_group(store=HashStore(), rank=0, world_size=1, **bound)
        return
    bound |= {"rank": rank.index, "world_size": rank.size}
    meeting = str(rank.rendezvous)
    if meeting == "env://":  # torchrun's, which knows the network
        dist.init_process_group(init_method=meeting, **bound)
        return
    if meeting.startswith("file:"):  # all on this host: nothing listens beyond it
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = FileStore(meeting.removeprefix("file://"), rank.size)
    else:  # who starts the ranks serves the store
        host, _, port = meeting.removeprefix("tcp://").rpartition(":")
        store = TCPStore(host, int(port), is_master=False)
    dist.init_process_group(store=store, **bound)
