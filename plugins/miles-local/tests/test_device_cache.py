"""A trainer's cache of device memory is taken in blocks and given back, on a device that is counted here."""

import math
from types import SimpleNamespace

import pytest
import torch
from miles_local import device_cache
from miles_local.device_cache import BLOCK, SPARE, DeviceCache

GIB = 2**30
NEEDS = 100 * 256 * 2**20
"""Bytes of a batch's tensors."""


class Device:
    """An allocator's figures, as torch.cuda gives them: every request to the device is a segment of its own."""

    def __init__(self, size: int):
        self.size, self.cached, self.used, self.calls = size, 0, 0, 0

    def memory_reserved(self) -> int:
        return self.cached + self.used

    def memory_allocated(self) -> int:
        return self.used

    def mem_get_info(self) -> tuple[int, int]:
        return self.size - self.memory_reserved(), self.size

    def empty_cache(self) -> None:
        self.cached = 0

    def take(self, size: int, **_: object) -> None:
        assert size <= self.mem_get_info()[0]
        self.cached, self.calls = self.cached + size, self.calls + 1


@pytest.fixture
def device(monkeypatch) -> Device:
    device = Device(100 * GIB)
    for name in ("memory_reserved", "memory_allocated", "mem_get_info", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, getattr(device, name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device_cache.torch, "empty", device.take)
    return device


def config(*, colocate: bool = True, offload_rollout: bool = True) -> SimpleNamespace:
    return SimpleNamespace(perf=SimpleNamespace(colocate=colocate, offload_rollout=offload_rollout))


def batch(device: Device, cache: DeviceCache, *, needs: int, lasting: int = 0) -> int:
    """A batch for which training needs some bytes in a hundred tensors; the calls of the device that it took."""
    before = device.calls
    cache.fill()
    missing = max(0, needs - device.cached)
    for _ in range(100 if missing else 0):
        device.take(missing // 100)
    if lasting:  # a tensor in what was taken, which stays
        device.used, device.cached = device.used + lasting, device.cached - lasting
    cache.give_back()
    return device.calls - before


def test_what_the_last_batch_needed_is_taken_in_blocks(device):
    cache = DeviceCache(config())
    assert batch(device, cache, needs=NEEDS) == 100
    assert device.cached == 0
    assert batch(device, cache, needs=NEEDS) == math.ceil(NEEDS / BLOCK)
    assert device.cached == 0


def test_nothing_is_taken_ahead_where_it_may_not_fit(device):
    cache = DeviceCache(config())
    batch(device, cache, needs=NEEDS)
    device.used = device.size - int(SPARE * NEEDS) + 1  # somebody else's
    cache.fill()
    assert device.cached == 0


@pytest.mark.parametrize("apart", [{"colocate": False}, {"offload_rollout": False}])
def test_a_device_of_its_own_keeps_its_cache(device, apart):
    cache = DeviceCache(config(**apart))
    assert batch(device, cache, needs=NEEDS) == 100
    assert batch(device, cache, needs=NEEDS) == 0
    assert device.cached == NEEDS


def test_tensors_that_stay_in_several_blocks_end_it(device, monkeypatch):
    cache = DeviceCache(config())
    batch(device, cache, needs=NEEDS)
    monkeypatch.setattr(device, "empty_cache", lambda: setattr(device, "cached", 2 * BLOCK))
    monkeypatch.setattr(torch.cuda, "empty_cache", device.empty_cache)
    batch(device, cache, needs=NEEDS)
    device.cached, calls = 0, device.calls
    cache.fill()
    assert device.calls == calls
