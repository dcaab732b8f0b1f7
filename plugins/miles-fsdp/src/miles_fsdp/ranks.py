"""Processes that know one another: joining, the mesh that parameters are sharded over, and sums of plain numbers."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from miles_local import rendezvous
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from miles_core.types import Rank
from miles_fsdp.context import ALONE, Context
from miles_fsdp.tensor_parallel import AXIS


class Ranks:
    """The process group of a trainer. Tensors travel where they lie, Python objects over gloo.

    `data` ranks, of which this is the `data_index`-th, take micro-batches of their own. `counts`: this one's losses do,
    and no other has the same. `first`: of the ranks with copies of what a layer does not share among them.

    Args:
        timeout: seconds after which a collective that some process does not join is an error.
        context: ranks that share the rows of each micro-batch: those with consecutive numbers.
        tensor: ranks that share the projections of each layer, likewise; one of the two is 1.
    """

    def __init__(self, rank: Rank, timeout: float, context: int = 1, tensor: int = 1):
        self.index, self.size = rank.index, rank.size
        self.device = torch.device("cuda", rank.local) if torch.cuda.is_available() else torch.device("cpu")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._joined = not dist.is_initialized()
        if self._joined:
            rendezvous.join(rank, timeout)
        self.mesh: DeviceMesh = init_device_mesh(self.device.type, (self.size,))
        together = context * tensor
        self.data, self.data_index = self.size // together, self.index // together
        self.counts, self.first = self.index % together == 0, self.index % tensor == 0
        self.context = ALONE
        self.tensor: DeviceMesh | None = None
        if tensor > 1:
            both = init_device_mesh(self.device.type, (self.data, tensor), mesh_dim_names=("data", AXIS))
            self.mesh, self.tensor = both["data"], both[AXIS]
        if context > 1:
            grid = init_device_mesh(self.device.type, (self.data, context), mesh_dim_names=("data", "context"))
            self.context = Context(self.index % context, context, grid["context"].get_group())
        self._host = dist.new_group(backend=rendezvous.host_backend(), timeout=datetime.timedelta(seconds=timeout))

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

    def wait(self, group: dist.ProcessGroup | None = None) -> None:
        """Until all ranks are here, by a group of the calling threads if that is given."""
        if self.size > 1:
            dist.barrier(group=group or self._host)

    def leave(self) -> None:
        """End the process group, if this object has made it."""
        if self._joined and dist.is_initialized():
            dist.destroy_process_group()
