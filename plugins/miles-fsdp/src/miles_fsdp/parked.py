"""Tensors whose bytes lie in host memory while an engine has the GPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from miles_local.transfer import host_memory

from miles_fsdp.adamw import local


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
                self._copies[name] = copy = host_memory(on_device.nbytes, on_device.is_cuda)
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
    mine = local(tensor).detach()
    return torch.empty(0, dtype=torch.uint8, device=mine.device).set_(mine.untyped_storage())


def _finish(copies: Mapping[str, torch.Tensor]) -> None:
    if any(one.is_cuda for one in copies.values()):
        torch.cuda.synchronize()
