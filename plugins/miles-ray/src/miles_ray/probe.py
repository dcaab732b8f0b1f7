"""Probe: what one process measures of its GPU, and of the way to others. On a CPU the same, smaller and over gloo."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

PRODUCTS = {"cuda": 100, "cpu": 1}
"""Products of one pass: a GPU needs some milliseconds to show how fast it is."""
SIDE = {"cuda": 4096, "cpu": 512}
"""Of the square matrices. Sums of 4096 signs stay below 512 in practice, where bfloat16 has every even number."""
MEMORY = {"cuda": 0.9, "cpu": 2**25}
"""Share of the free memory that is written and read, on a CPU bytes."""
BLOCK = 2**28
"""Bytes of one piece of it."""
MESSAGE = {"cuda": 2**28, "cpu": 2**20}
"""Bytes of an all-reduce."""


@dataclass(frozen=True, slots=True)
class Alone:
    """What a GPU does by itself.

    Args:
        fault: what was wrong, "" where nothing was.
        tflops: of a product of matrices [1e12/s].
        memory_gbs: at which memory is written [1e9 bytes/s].
        free_gib: device memory that nobody uses [GiB]; 0 on a CPU.
    """

    fault: str
    tflops: float
    memory_gbs: float
    free_gib: float


class Probe:
    """Lives in a process of its own.

    Args:
        host: address by which others reach this process.
        gpu: number of its GPU among those that the process sees; None for the CPU.
        timeout: of an exchange with others [s].
    """

    passes = 5
    """Timed repetitions of each measure."""
    typical = staticmethod(statistics.median)
    """Of the seconds of a measure's passes: a link that fails now and then is to be seen, one interruption is not."""

    def __init__(self, host: str, gpu: int | None, timeout: float):
        self._host, self._timeout = host, timedelta(seconds=timeout)
        self._device = torch.device("cpu" if gpu is None else f"cuda:{gpu}")
        self._store: Any = None
        if gpu is not None:
            torch.cuda.set_device(self._device)

    def meet(self) -> str:
        """HOST:PORT of a store by which a group finds itself."""
        if self._store is None:
            self._store = dist.TCPStore(self._host, 0, is_master=True, wait_for_workers=False, timeout=self._timeout)
        return f"{self._host}:{self._store.port}"

    def alone(self) -> Alone:
        """Products that are right, and how fast; memory that keeps what is written."""
        free = torch.cuda.mem_get_info(self._device)[0] if self._device.type == "cuda" else 0
        wrong, tflops = self._products()
        lost, memory = self._memory(free)
        return Alone("; ".join(filter(None, (wrong, lost))), tflops, memory, free / 2**30)

    def together(self, at: str, name: str, index: int, size: int) -> float:
        """Bandwidth of an all-reduce among the members of a group, as NCCL's tests count it [1e9 bytes/s].

        Args:
            at: what `meet` of the first member gave.
            name: of this group, which no other has.

        Raises:
            RuntimeError: a member did not come in time, or the sum is wrong.
        """
        host, _, port = at.rpartition(":")
        store = self._store if index == 0 else dist.TCPStore(host, int(port), is_master=False, timeout=self._timeout)
        cuda = self._device.type == "cuda"
        dist.init_process_group("nccl" if cuda else "gloo", store=dist.PrefixStore(name, store), rank=index,
                                world_size=size, timeout=self._timeout, device_id=self._device if cuda else None)
        try:
            data = torch.empty(MESSAGE[self._device.type] // 4, device=self._device)
            seconds = [self._exchange(data, index, size) for _ in range(1 + self.passes)][1:]
        finally:
            dist.destroy_process_group()
        return data.nbytes / self.typical(seconds) * 2 * (size - 1) / size / 1e9

    def _exchange(self, data: torch.Tensor, index: int, size: int) -> float:
        """Seconds of one all-reduce.

        Raises:
            RuntimeError: it gave a wrong sum.
        """
        data.fill_(index + 1)
        self._wait()
        begin = time.perf_counter()
        self._sum(data)
        self._wait()
        seconds = time.perf_counter() - begin
        if not bool((data == size * (size + 1) // 2).all()):
            raise RuntimeError("an all-reduce gave a wrong sum")
        return seconds

    def _products(self) -> tuple[str, float]:
        """A product of signs has exact results; a vector of small integers finds a wrong one in exact arithmetic."""
        side, draws = SIDE[self._device.type], torch.Generator().manual_seed(0)
        a, b = (torch.randint(0, 2, (side, side), generator=draws) * 2 - 1 for _ in range(2))
        vector = torch.randint(1, 64, (side,), generator=draws).double()
        kind = torch.bfloat16 if self._device.type == "cuda" else torch.float32
        left, right = (part.to(self._device, kind) for part in (a, b))
        first, seconds, alike = self._multiply(left, right), [], True
        for _ in range(self.passes):
            self._wait()
            begin = time.perf_counter()
            for _ in range(PRODUCTS[self._device.type]):
                product = self._multiply(left, right)
            self._wait()
            seconds.append(time.perf_counter() - begin)
            alike &= torch.equal(product, first)
        right_sums = torch.equal(first.cpu().double() @ vector, a.double() @ (b.double() @ vector))
        fault = "" if right_sums and alike else "wrong products" if alike else "products that change"
        return fault, 2 * side**3 * PRODUCTS[self._device.type] / self.typical(seconds) / 1e12

    def _memory(self, free: int) -> tuple[str, float]:
        """Write a number to most of the memory that is free, then look for it."""
        cuda = self._device.type == "cuda"
        size = int(free * MEMORY["cuda"]) if cuda else int(MEMORY["cpu"])
        blocks = [torch.empty(min(BLOCK, size) // 4, dtype=torch.int32, device=self._device)
                  for _ in range(max(1, size // BLOCK))]
        seconds, lost = [], False
        for word in (0x55555555, -0x55555556):  # every bit both ways
            for block in blocks:
                self._wait()
                begin = time.perf_counter()
                block.fill_(word)
                self._wait()
                seconds.append(time.perf_counter() - begin)
            lost |= any(bool((block != word).any()) for block in blocks)
        speed = blocks[0].nbytes / self.typical(seconds) / 1e9
        blocks.clear()
        if cuda:
            torch.cuda.empty_cache()  # NCCL wants some of it
        return "memory that forgets" if lost else "", speed

    def _multiply(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left @ right

    def _sum(self, data: torch.Tensor) -> None:
        dist.all_reduce(data)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
