"""Tensor parallelism by the plan that transformers keeps of an architecture (Megatron-LM, arXiv:1909.08053).

Of a layer's projections each rank of a group has some of the columns, or of the rows; what comes together is added up.
Embedding, norms and output layer are whole on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

from miles_core.errors import ConfigError
from miles_fsdp.adamw import local

STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
AXIS = "tensor"
"""Of the mesh."""
PARTIAL = "replicated_with_grad_allreduce"
"""Whole on each rank, which uses it for its own heads alone."""


def split(model: PreTrainedModel, mesh: DeviceMesh, layers: Sequence[torch.nn.Module]) -> set[str]:
    """Have each rank of a mesh of one dimension hold its part of the layers' projections.

    Returns:
        Parameters that are whole on each rank, which uses them for its own heads alone: see `add_up`.

    Raises:
        ConfigError: the architecture has no plan, one with other styles, or sizes that do not divide.
    """
    inside = {part for layer in layers for part in layer.modules()}
    planned = [(name, part, style) for name, part, style in _planned(model) if part in inside]
    odd = {f"the style {style}" for *_, style in planned if style not in (*STYLES, PARTIAL)}
    odd |= {f"{name}, which is more than a linear layer" for name, part, style in planned
            if style in STYLES and not _is_plain(part)}
    if odd or not planned:
        raise _unsupported(model, min(odd) if odd else "no plan in transformers")
    config, size = model.config.get_text_config(), mesh.size()
    sizes = {f"{name} {getattr(config, name)}" for name in ("num_attention_heads", "num_key_value_heads")
             if getattr(config, name, size) % size}
    sizes |= {f"{name} {_along(part, style)}" for name, part, style in planned
              if style != PARTIAL and _along(part, style) % size}
    if sizes:
        raise _unsupported(model, f"{min(sizes)}, which does not divide among {size} ranks")
    parallelize_module(model, mesh, {name: STYLES[style]() for name, _, style in planned if style != PARTIAL})
    return {f"{name}.{own}" for name, part, style in planned if style == PARTIAL for own, _ in part.named_parameters()}


def _planned(model: PreTrainedModel) -> Iterator[tuple[str, Any, str]]:
    """(name, module, style) of what transformers plans to split."""
    patterns = [(re.compile(re.escape(name).replace(r"\*", r"\d+")), style)
                for name, style in (model.tp_plan or {}).items()]
    for name, part in model.named_modules():
        for pattern, style in patterns:
            if pattern.fullmatch(name):
                yield name, part, style


def _is_plain(part: torch.nn.Module) -> bool:
    """Whether a layer is linear and has nothing else, as an adapter."""
    return type(part) is torch.nn.Linear and {name for name, _ in part.named_parameters()} <= {"weight", "bias"}


def _along(part: torch.nn.Linear, style: str) -> int:
    return part.out_features if style == "colwise" else part.in_features


def _unsupported(model: PreTrainedModel, got: str) -> ConfigError:
    return ConfigError("tensor parallelism splits linear layers whose heads divide, as transformers plans it", got=got,
                       who=f"[fsdp] tensor_parallel_size, {type(model).__name__}", code="fsdp-tensor-unsupported",
                       fix="leave it out, or train with --trainer megatron")


def add_up(model: torch.nn.Module, partial: Set[str], group: dist.ProcessGroup) -> None:
    """Gradients of what each rank has used for its own heads become those of all heads."""
    for name, parameter in model.named_parameters():
        if name in partial and parameter.grad is not None:
            dist.all_reduce(local(parameter.grad), group=group)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a parameter; every rank calls it."""
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.device_mesh.ndim > 1:  # one after the other, in the order in which they were split
        tensor = tensor.redistribute(placements=[Replicate(), *tensor.placements[1:]])
    return tensor.full_tensor()


def is_split(parameter: torch.Tensor) -> bool:
    """Whether the ranks of a group have different parts of it; of others all have copies."""
    if not isinstance(parameter, DTensor) or AXIS not in (axes := parameter.device_mesh.mesh_dim_names or ()):
        return False
    return parameter.placements[axes.index(AXIS)].is_shard()
