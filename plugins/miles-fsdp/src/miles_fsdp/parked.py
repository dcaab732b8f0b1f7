"""Tensors whose bytes lie in host memory while an engine has the GPU."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

logger = logging.getLogger(__name__)


class Parked:
    """Storages that have no bytes on their device for a while. Tensors, and views of them, stay what they are.

    What is parked again goes where it lay before: memory of the host is found and pinned once.
    """

    def __init__(self) -> None:
        self._copies: dict[str, torch.Tensor] = {}
        self._away: set[str] = set()

    def park(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Tensors by names that stay the same from call to call; those that are parked already stay so."""
        leaving = {name: _bytes(tensor) for name, tensor in tensors.items() if name not in self._away}
        for name, on_device in leaving.items():
            copy = self._copies.get(name)
            if copy is None or copy.nbytes != on_device.nbytes:
                self._copies[name] = copy = _host_memory(on_device)
            copy.copy_(on_device, non_blocking=True)
        _finish(leaving)
        for name, on_device in leaving.items():
            on_device.untyped_storage().resize_(0)
            self._away.add(name)

    def fetch(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The inverse, of those that are parked."""
        coming = {name: _bytes(tensor) for name, tensor in tensors.items() if name in self._away}
        for name, on_device in coming.items():
            on_device.untyped_storage().resize_(self._copies[name].nbytes)
            _bytes(on_device).copy_(self._copies[name], non_blocking=True)
        _finish(coming)
        self._away -= coming.keys()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All of the storage that this rank's part of a tensor lies in, as uint8."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return torch.empty(0, dtype=torch.uint8, device=local.device).set_(local.detach().untyped_storage())


def _host_memory(like: torch.Tensor) -> torch.Tensor:
    """Pinned where there is a GPU, but not by torch's allocator, whose pieces are powers of two."""
    copy = torch.empty(like.nbytes, dtype=torch.uint8)
    if like.is_cuda and copy.nbytes:
        runtime, address = torch.cuda.cudart(), copy.data_ptr()
        if int(runtime.cudaHostRegister(address, copy.nbytes, 0)):
            logger.warning("%.1f GiB of host memory cannot be pinned, so copies are slow: raise ulimit -l",
                           copy.nbytes / 2**30)
        else:  # memory that is freed while it is pinned would go on being what the GPU writes to
            weakref.finalize(copy, runtime.cudaHostUnregister, address).atexit = False
    return copy


def _finish(copies: Mapping[str, torch.Tensor]) -> None:
    if any(one.is_cuda for one in copies.values()):
        torch.cuda.synchronize()
