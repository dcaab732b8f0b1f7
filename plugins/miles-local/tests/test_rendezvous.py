"""Processes that meet: what they say arrives, and their groups cost nothing while nobody says anything."""

import asyncio
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from miles_local import rendezvous

from miles_core.hosts import process_group
from miles_core.types import Rank


class Meeting:
    """A rank with five groups of all ranks."""

    def __init__(self, rank: Rank):
        self.rank = rank

    def meet(self):
        rendezvous.join(self.rank, 30)
        groups = [dist.group.WORLD, *(dist.new_group(timeout=timedelta(seconds=30)) for _ in range(5))]
        sums = torch.full((len(groups),), self.rank.index + 1.0)
        for index, group in enumerate(groups):
            dist.all_reduce(sums[index], group=group)
        return {self.rank.index: (sums.tolist(), _threads_of_gloo())}


def _threads_of_gloo() -> int:
    """How many there are once their number rests: each takes its name by itself, when it first runs."""
    counts = [0, -1]
    until = time.monotonic() + 10
    while (counts[-1] < 1 or counts[-1] != counts[-2]) and time.monotonic() < until:
        time.sleep(0.1)
        names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
        counts.append(sum(name.startswith("gloo_tcp") for name in names))
    return counts[-1]


@pytest.mark.skipif(not Path("/proc/self/task").exists() or torch.cuda.is_available(), reason="Linux, no GPU")
@pytest.mark.parametrize("size", [1, 2])
def test_the_groups_of_a_process_share_the_thread_that_looks_for_messages(size):
    async def main():
        ranks = process_group("meeting", size, Meeting)
        ranks.timeout = 60
        try:
            return await ranks.meet()
        finally:
            await ranks.close()

    assert asyncio.run(main()) == {rank: ([sum(range(1, size + 1))] * 6, 1) for rank in range(size)}
