"""AdamW over sharded parameters, by what this rank holds of each."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor


class ShardedAdamW(torch.optim.AdamW):
    """torch's own, with its state in sharded tensors, but kernels get this rank's shards: for a list of sharded tensors
    torch works out anew in each step how the result is sharded, and a GPU is done before that is."""

    def _init_group(self, group: dict[str, Any], *lists: list[torch.Tensor]) -> bool:
        has_complex: bool = cast("Any", super())._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(local, tensors)
        return has_complex


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard, which it shares memory with; a tensor that is not sharded as it is."""
    return cast("torch.Tensor", cast("Any", tensor)._local_tensor) if isinstance(tensor, DTensor) else tensor
