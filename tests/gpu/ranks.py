"""A trainer of random weights in every rank: what scripts that measure several GPUs start."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Case:
    """Lives in each rank; weights are Megatron's random ones."""

    def __init__(self, selected: Any, config: Any, rank: Any):
        import torch
        from miles_megatron.model_on_rank import ModelOnRank

        from miles_core.build import trainer_part

        ModelOnRank.fill = lambda self, source: None  # there are no files
        self.rank = rank
        self.trainer = trainer_part(list(selected), config, rank)
        self.gpu, self.before = torch.cuda.is_available(), _status("VmRSS")
        self.trainer.load()
        self.seconds: dict[str, list[float]] = {"score": [], "step": []}

    def train(self, batch: Any, steps: int, profile: bool = False) -> dict[int, dict[str, Any]]:
        """Whole rollouts on one batch; rank -> what came of them. With profile one more, which torch's profiler watches
        on the first GPU.

        A GPU's peak is that of torch's allocator from the second step on, a CPU's the kernel's high-water mark over
        what the process had before.
        """
        import torch
        from trainer_speed import profiled

        metrics, traces, watched = [], [], self.gpu and self.rank.index == 0
        for index in range(steps + profile):
            self.trainer.take_batch(batch)
            scores = self._timed("score", self.trainer.score) | self.trainer.advantage()
            if self.gpu and index == 1:
                torch.cuda.reset_peak_memory_stats()
            if index == steps and watched:
                profiled(lambda: self.trainer.step(0), traces)
            else:
                metrics.append(scores | self._timed("step", self.trainer.step, 0))
            self.trainer.end_batch()
        peak = torch.cuda.max_memory_allocated() if self.gpu else _status("VmHWM") - self.before
        return {self.rank.index: {
            "peak": peak, "seconds": self.seconds, "profile": traces,
            **{name: [one[f"train/{name}"] for one in metrics if f"train/{name}" in one]  # of the last stage
               for name in ("loss", "grad_norm")}}}

    def _timed(self, what: str, call: Callable, *args: Any) -> Any:
        """What the call returns; its seconds, until the GPU is done, are kept."""
        import torch

        if self.gpu:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        result = call(*args)
        if self.gpu:
            torch.cuda.synchronize()
        self.seconds[what].append(time.perf_counter() - begin)
        return result


async def trained(plan: Any, ranks: int, *args: Any) -> dict[int, dict[str, Any]]:
    """The figures of Case.train of every rank."""
    from miles_core.hosts import process_group

    handle = process_group("case", ranks, Case, plan.selected, plan.config)
    handle.timeout = 3600
    try:
        return await handle.train(*args)
    finally:
        await handle.close()


def _status(field: str) -> int:
    """A size in /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])
