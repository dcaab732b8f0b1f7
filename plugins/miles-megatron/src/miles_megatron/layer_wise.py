"""Layer-wise distributed optimizer: data-parallel ranks divide whole parameters; each steps its own and sends them.

Megatron-core's LayerWiseDistributedOptimizer divides by the order of sizes, gathers into copies of all parameters, by
lists of unequal lengths that gloo refuses, and only in `step`, which a run here takes apart. So of Megatron-core these
are the optimizers of parameters, made on each rank of its own alone, and the chain of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from miles_megatron import cpu

cpu.install()

from megatron.core import parallel_state  # noqa: E402 - after install()
from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer  # noqa: E402


@dataclass(frozen=True, slots=True)
class Share:
    """A parameter, and which rank of its data-parallel group has the optimizer's state of it."""

    parameter: torch.nn.Parameter
    owner: int
    group: dist.ProcessGroup

    @property
    def own(self) -> bool:
        """Whether it is this rank's."""
        return self.group.rank() == self.owner


def shares(chunks: Sequence[torch.nn.Module], size: Callable[[torch.nn.Parameter], int]) -> list[Share]:
    """What trains, the largest first, each to the rank that has least so far; experts in a group of their own.

    Ranks that hold the same parameters, or parts of the same, find the same owners: only sizes and their order count.

    Args:
        size: of a parameter's state.
    """
    trained = [one for chunk in chunks for one in chunk.parameters() if one.requires_grad]
    groups = {True: parallel_state.get_data_parallel_group(with_context_parallel=True),
              False: parallel_state.get_expert_data_parallel_group()}
    loads = {dense: [0] * group.size() for dense, group in groups.items()}
    division = []
    for one in sorted(trained, key=size, reverse=True):
        dense = getattr(one, "allreduce", True)
        owner = min(range(len(loads[dense])), key=loads[dense].__getitem__)
        loads[dense][owner] += size(one)
        division.append(Share(one, owner, groups[dense]))
    return division


@contextmanager
def only_own(divided: Sequence[Share]) -> Iterator[None]:
    """Inside, other ranks' parameters do not train: Megatron makes an optimizer, and masters, of what does."""
    others = [share.parameter for share in divided if not share.own]
    for one in others:
        one.requires_grad_(False)
    try:
        yield
    finally:
        for one in others:
            one.requires_grad_(True)


class LayerWiseOptimizer(ChainedOptimizer):
    """Megatron's optimizers of this rank's parameters.

    Args:
        parts: made inside `only_own`; a gradient counts on one rank only, so norms are sums over all ranks.
    """

    def __init__(self, parts: list[MegatronOptimizer], divided: Sequence[Share]):
        super().__init__(parts)
        self._divided = [share for share in divided if share.group.size() > 1]
        for part in parts:
            part.grad_stats_parallel_group = dist.group.WORLD

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Step this rank's parameters; all ranks have all of them afterwards."""
        stepped = super().step_with_ready_grads()
        # One group after the other: ranks meet in several, and in each in the same order.
        for group in dict.fromkeys(share.group for share in self._divided):
            sent = [dist.broadcast(share.parameter.data, group=group, group_src=share.owner, async_op=True)
                    for share in self._divided if share.group is group]
            for one in sent:
                one.wait()
        return stepped

    def sharded_state_dict(self, *args: Any, **options: Any) -> dict:
        """What each rank saves of its own parameters; no data-parallel rank has a copy that could stand for it."""
        state = super().sharded_state_dict(*args, **options)
        for entry in nested_values(state):
            if hasattr(entry, "replica_id"):
                entry.replica_id = (*entry.replica_id[:2], 0)
        return state
