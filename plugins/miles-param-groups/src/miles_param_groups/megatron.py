"""The names of Megatron's parameters over the whole model, however its ranks split it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from miles_megatron.specs import WeightMap
from miles_megatron.weights import EMBEDDING, global_parameters, instances

_COPY = "output_layer.weight"
"""Of a tied embedding, on a pipeline stage of its own."""


def parameters(chunks: Sequence[torch.nn.Module], weight_map: WeightMap) -> dict[str, torch.nn.Parameter]:
    """This rank's by Megatron's names; a copy of the embedding has the embedding's."""
    named = global_parameters(chunks)
    if weight_map.tied and EMBEDDING not in named and _COPY in named:
        named[EMBEDDING] = named.pop(_COPY)
    return {name: one for name, one in named.items() if isinstance(one, torch.nn.Parameter)}


def everywhere(mine: Mapping[str, torch.nn.Parameter], weight_map: WeightMap) -> dict[str, tuple[str, ...]]:
    """Megatron's name -> the checkpoint's names of what it is made of, of the parameters of all ranks."""
    gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, list(mine))
    on_disk = {name: names for name, _, names in instances(weight_map)}
    return {name: on_disk.get(name, ()) for name in sorted({name for names in gathered for name in names})}
