"""The processes of a trainer meet: `torch.distributed` over the store that their Rank names.

By default each of gloo's process groups brings a device, whose thread looks for messages 100 times a second. Megatron
makes 17 groups for a layout, and caches of DTensor keep those of trainers that are gone. On a CPU all groups of one
process share a device: the backend `SHARED`, which is torch's gloo in all else.
"""

from __future__ import annotations

import datetime
import functools
import os

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, Store, TCPStore

from miles_core.types import Rank

SHARED = "gloo_shared"


def join(rank: Rank, timeout: float | None = None) -> None:
    """Initialise `torch.distributed` for the rank; one process alone needs no port.

    Args:
        timeout: seconds after which a collective that some process does not join is an error; by default torch's.
    """
    bound = {} if timeout is None else {"timeout": datetime.timedelta(seconds=timeout)}
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else host_backend()
    if rank.size > 1 and rank.rendezvous == "env://":  # torchrun's, which knows the network
        dist.init_process_group(backend, init_method="env://", rank=rank.index, world_size=rank.size, **bound)
        return
    dist.init_process_group(backend, store=_store(rank), rank=rank.index if rank.size > 1 else 0,
                            world_size=rank.size, **bound)


def host_backend() -> str:
    """The backend of groups whose tensors are on the host."""
    if torch.cuda.is_available():
        return "gloo"
    if not hasattr(dist.Backend, SHARED.upper()):
        dist.Backend.register_backend(SHARED, _group, devices=["cpu"])
    return SHARED


def _store(rank: Rank) -> Store:
    if rank.size == 1:
        return HashStore()
    meeting = str(rank.rendezvous)
    if meeting.startswith("file:"):  # all on this host: nothing listens beyond it
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        return FileStore(meeting.removeprefix("file://"), rank.size)
    host, _, port = meeting.removeprefix("tcp://").rpartition(":")  # who starts the ranks serves the store
    return TCPStore(host, int(port), is_master=False)


def _group(store: Store, rank: int, size: int, timeout: datetime.timedelta) -> dist.ProcessGroupGloo:
    options = dist.ProcessGroupGloo._Options()
    options._devices = _devices(os.environ.get("GLOO_SOCKET_IFNAME", ""))
    options._timeout = timeout
    options._threads = 2 * len(options._devices)
    return dist.ProcessGroupGloo(store, rank, size, options)


@functools.cache
def _devices(interfaces: str) -> list[dist.ProcessGroupGloo.Device]:
    """One for each network interface, as torch reads GLOO_SOCKET_IFNAME."""
    if not interfaces:
        return [dist.ProcessGroupGloo.create_default_device()]
    return [dist.ProcessGroupGloo.create_device(interface=name) for name in interfaces.split(",")]
