"""Ray actors host the trainer's ranks as spawned processes do: the same figures, and a death that is named."""

from __future__ import annotations

import asyncio

import pytest

ray = pytest.importorskip("ray")

from miles_core.backends.ray.host import ray_group  # noqa: E402 - Ray is an extra
from miles_core.errors import DiedError  # noqa: E402

pytestmark = pytest.mark.xdist_group("layouts")


class Arithmetic:
    """A rank that adds its number to what it is asked, over all ranks."""

    def __init__(self, rank):
        from miles_core.backends.megatron import cpu

        cpu.process_group(rank, 60)
        self.rank = rank

    def total(self, number: int) -> int:
        import torch
        import torch.distributed as dist

        found = torch.tensor(number + self.rank.index)
        dist.all_reduce(found)
        return int(found)

    def refuse(self) -> None:
        raise ValueError(f"rank {self.rank.index} will not")

    def end(self) -> None:
        import os

        if self.rank.index == 1:
            os._exit(3)


async def questions() -> list[str]:
    """A sum over ranks, an error of theirs, a death; each on ranks of their own where the last ended them."""
    found = []
    ranks = ray_group("trial", 2, Arithmetic)
    try:
        found.append(str(await ranks.total(10)))
        await ranks.refuse()
    except ValueError as error:
        found.append(str(error))
    await ranks.close()
    ranks = ray_group("trial", 2, Arithmetic)
    with pytest.raises(DiedError, match="actor of trial rank 1 died in end"):
        await ranks.end()
    with pytest.raises(DiedError):  # and every later call says so at once
        await ranks.total(1)
    await ranks.close()
    return found


def test_a_ray_of_our_own_starts_and_ends_with_the_ranks():
    assert asyncio.run(questions()) == ["21", "rank 0 will not"]
    assert not ray.is_initialized()


def test_a_ray_that_is_there_stays():
    """Then the ranks meet over a store of the first one, as they do in a cluster."""
    ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    try:
        assert asyncio.run(questions()) == ["21", "rank 0 will not"]
        assert ray.is_initialized()
    finally:
        ray.shutdown()
