"""Which rank has which part of a parameter: tensor-parallel parts, and the stage and expert rank that own it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from miles_megatron import cpu, tensor_merges
from miles_megatron.specs import Rule, WeightMap
from miles_megatron.stacks import StackedParameter

cpu.install()

from megatron.core import parallel_state  # noqa: E402 - after install()


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds a parameter, and what its HF tensors look like to those who do not."""

    stage: int
    expert: int
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    buffer: bool

    def send(self, part: torch.Tensor, *, expert: bool) -> torch.Tensor:
        """From the owner to every rank: over its stage's expert-parallel group, then from stage to stage."""
        experts = parallel_state.get_expert_model_parallel_group()
        stages = parallel_state.get_pipeline_model_parallel_group()
        if expert and experts.size() > 1 and stages.rank() == self.stage:
            part = part.contiguous()
            dist.broadcast(part, group=experts, group_src=self.expert)
        if stages.size() > 1:
            part = part.contiguous()
            dist.broadcast(part, group=stages, group_src=self.stage)
        return part


def owners(parameters: Mapping[str, torch.Tensor], rules: Mapping[str, Rule], weight_map: WeightMap
           ) -> dict[str, Owner]:
    """The owner of every parameter of the model, agreed between stages and expert-parallel ranks.

    Args:
        rules: by the names of parameters.
    """
    stage = parallel_state.get_pipeline_model_parallel_rank()
    agreed = {
        name: Owner(stage, parallel_state.get_expert_model_parallel_rank() if rules[name].experts else 0,
                    tuple(map(tuple, hf_shapes(rules[name], parameter, weight_map))), parameter.dtype,
                    not isinstance(parameter, torch.nn.Parameter))
        for name, parameter in parameters.items() if name in rules
    }  # fmt: skip
    for group in (parallel_state.get_expert_model_parallel_group(), parallel_state.get_pipeline_model_parallel_group()):
        if group.size() > 1:
            parts: list[dict[str, Owner]] = [{}] * group.size()
            dist.all_gather_object(parts, agreed, group=group)
            agreed = {name: owner for part in parts for name, owner in part.items()}
    return agreed


def _tensor_group(parameter: torch.Tensor) -> dist.ProcessGroup:
    """Experts have a tensor-parallel group of their own; Megatron marks them with allreduce = False."""
    if getattr(parameter, "allreduce", True):
        return parallel_state.get_tensor_model_parallel_group()
    return parallel_state.get_expert_tensor_parallel_group()


def _tensor_size(parameter: torch.Tensor) -> int:
    """Ranks among which the parameter is cut; 1 for one that each rank holds whole."""
    cut = getattr(parameter, "tensor_model_parallel", False)
    return _tensor_group(parameter).size() if cut else 1


def hf_shapes(rule: Rule, parameter: torch.Tensor, weight_map: WeightMap) -> list[list[int]]:
    """Of the whole HF tensors that a parameter, or this rank's part of it, is made of."""
    experts, full = list(parameter.shape[:_before(parameter)]), list(parameter.shape[_before(parameter):])
    if (size := _tensor_size(parameter)) > 1:
        full[parameter.partition_dim] *= size
    return [experts + shape for shape in tensor_merges.hf_shapes(rule, full, weight_map)]


def hf_tensors(rule: Rule, parameter: torch.Tensor, weight_map: WeightMap, part: torch.Tensor | None = None
               ) -> list[torch.Tensor]:
    """The whole HF tensors that a parameter is made of, gathered from its tensor-parallel ranks; views if there is one.

    The tensors of a rule lie one after the other along the first axis of an expert: that is put before the experts'.

    Args:
        part: what lies as the parameter does, such as its gradient, instead of itself.
    """
    before, part = _before(parameter), parameter.detach() if part is None else part
    if _cuts_groups(rule, parameter, weight_map):
        return tensor_merges.whole(rule, [*tensor_merges.split(rule, _gather(part, parameter), weight_map, 1)])
    pieces = tensor_merges.split(rule, part.transpose(0, before), weight_map, _tensor_size(parameter))
    parts = tensor_merges.whole(rule, [_gather(piece.transpose(0, before), parameter).transpose(0, before)
                                       for piece in pieces])
    return [part.transpose(0, before) for part in parts]


def part_of(rule: Rule, tensors: Iterable[torch.Tensor], parameter: torch.Tensor, weight_map: WeightMap
            ) -> torch.Tensor:
    """The inverse of `hf_tensors`: what of the whole HF tensors this rank's part of a parameter is."""
    pieces = (piece for number, tensor in enumerate(tensors) for piece in tensor_merges.pieces(rule, tensor, number))
    if _cuts_groups(rule, parameter, weight_map):
        return _shard(tensor_merges.join(rule, [*pieces], weight_map), parameter)
    return tensor_merges.join(rule, [_shard(piece, parameter) for piece in pieces], weight_map)


def _cuts_groups(rule: Rule, parameter: torch.Tensor, weight_map: WeightMap) -> bool:
    """Whether a group of heads, with its key and value, lies on several ranks, which is cut as it is joined."""
    return not tensor_merges.whole_groups(rule, weight_map, _tensor_size(parameter))


def _shard(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    size = _tensor_size(parameter)
    return tensor if size == 1 else tensor.chunk(size, parameter.partition_dim)[_tensor_group(parameter).rank()]


def _gather(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The inverse of `_shard`."""
    size = _tensor_size(parameter)
    if size == 1:
        return part
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(size)]
    dist.all_gather(parts, part.contiguous(), group=_tensor_group(parameter))
    return torch.cat(parts, parameter.partition_dim + _before(parameter))


def _before(parameter: torch.Tensor) -> int:
    """Axes before those of a parameter by itself."""
    return int(isinstance(parameter, StackedParameter))
