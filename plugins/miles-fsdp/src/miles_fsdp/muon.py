"""Muon of sharded parameters: matrices of hidden layers by miles_local.muon, and all else by AdamW.

The rows of a matrix lie on different ranks, and its singular values belong to the whole. So each matrix is gathered on
one rank, as many of them at a time as there are ranks, by one all-to-all, and its rows go back by another: no rank
repeats the work of one, and the result is that of a single rank. Experts that transformers stacks in one tensor are
sharded between matrices, and stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from miles_local.muon import MOMENTUM, Steps
from miles_local.muon_options import LAYER
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from miles_fsdp.adamw import ShardedAdamW
from miles_fsdp.plugin import FsdpOptions

OUTPUTS = "output_axis"
"""Of an optimizer's groups: matrices, [rows, columns] or stacks of them, of which this axis counts outputs."""


def output_axes(module: torch.nn.Module) -> dict[torch.nn.Parameter, int]:
    """The parameters that Muon moves, as Megatron-LM chooses them: matrices of layers, routers and adapters included.

    Stacks are those of modules that transformers marks as experts (`is_transposed`).
    """
    axes: dict[torch.nn.Parameter, int] = {}
    for path, part in module.named_modules():
        if isinstance(part, torch.nn.Embedding):
            continue
        for name, one in part.named_parameters(recurse=False):
            if one.ndim == 2 and name == "weight" and LAYER.search(f"{path}."):
                axes[one] = -2
            elif one.ndim == 3 and (transposed := getattr(part, "is_transposed", None)) is not None:
                axes[one] = -1 if transposed else -2
    return axes


class Muon(ShardedAdamW):
    """AdamW whose groups with an `output_axis` are moved by Muon; the state of their parameters is one momentum.

    It is one optimizer, so that schedules, checkpoints and hooks find what they find without it.

    Args:
        groups: of sharded parameters.
        adamw: settings of the other groups.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]], options: FsdpOptions, **adamw: Any):
        super().__init__([dict(group) for group in groups], **adamw)
        self._steps = Steps.of(replace(options, muon_fp32_matmul_prec=options.muon_fp32_matmul_prec or "highest"))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Every rank calls it."""
        every = self.param_groups
        with self._steps.products():
            for group in every:
                if OUTPUTS in group:
                    self._move(group)
        self.param_groups = [group for group in every if OUTPUTS not in group]
        try:
            super().step()
        finally:
            self.param_groups = every

    def _move(self, group: Mapping[str, Any]) -> None:
        rate, keep = group["lr"], 1 - group["lr"] * group["weight_decay"]
        for parameters in _together([one for one in group["params"] if one.grad is not None]):
            directions = self._directions(parameters)
            for one, direction in zip(parameters, directions, strict=True):
                scale = self._steps.scale(one.shape[group[OUTPUTS]], one.shape[-3 - group[OUTPUTS]])
                one.to_local().mul_(keep).add_(direction, alpha=-rate * scale)

    def _momentum(self, parameter: DTensor) -> torch.Tensor:
        """This rank's, which has seen the gradient, or what Nesterov looks ahead to."""
        state = self.state[parameter]
        if not state:
            state |= {"step": torch.zeros(()), MOMENTUM: torch.zeros_like(parameter)}
        state["step"] += 1  # AdamW asks for it when it loads a state
        return self._steps.ahead(state[MOMENTUM].to_local(), cast("DTensor", parameter.grad).to_local())

    def _directions(self, parameters: Sequence[DTensor]) -> list[torch.Tensor]:
        """This rank's rows of each; at most one matrix for each rank, or one stack."""
        momenta = [self._momentum(one) for one in parameters]
        if parameters[0].ndim == 3:
            return [self._steps.orthogonalized(one) for one in momenta]
        mesh = parameters[0].device_mesh
        rank, size = mesh.get_local_rank(), mesh.size()
        mine = parameters[rank].shape if rank < len(parameters) else torch.Size((0, 0))
        theirs = [one.numel() for one in momenta] + [0] * (size - len(momenta))
        own = [rows * mine[1] for rows in _rows(mine[0], size)]
        whole = _exchanged(torch.cat([one.flatten() for one in momenta]).to(mesh.device_type), theirs, own, mesh)
        back = _exchanged(self._steps.orthogonalized(whole.view(mine)).flatten(), own, theirs, mesh)
        return [part.view_as(one).to(one.device) for part, one in zip(back.split(theirs), momenta, strict=False)]


def _together(parameters: Sequence[DTensor]) -> Iterator[Sequence[DTensor]]:
    """A stack alone, and matrices of about one size: one for each rank at a time."""
    ordered = sorted(parameters, key=lambda one: (one.ndim, one.numel()))
    matrices = [one for one in ordered if one.ndim == 2]
    size = ordered[0].device_mesh.size() if ordered else 1
    yield from (matrices[first : first + size] for first in range(0, len(matrices), size))
    yield from ([one] for one in ordered if one.ndim == 3)


def _exchanged(values: torch.Tensor, sent: Sequence[int], received: Sequence[int], mesh: DeviceMesh) -> torch.Tensor:
    """[sum of sent], of which each rank gets its numbers -> [sum of received]."""
    arrived = values.new_empty(sum(received))
    dist.all_to_all_single(arrived, values, [*received], [*sent], group=mesh.get_group())
    return arrived


def _rows(count: int, ranks: int) -> list[int]:
    """How many of so many rows FSDP leaves to each rank."""
    each = -(-count // ranks)
    return [max(0, min(each, count - each * rank)) for rank in range(ranks)]
