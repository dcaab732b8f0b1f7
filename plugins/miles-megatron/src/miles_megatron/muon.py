"""Muon in Megatron's optimizers: matrices of layers by miles_local.muon, and all else by AdamW.

A parameter may be several matrices, as queries, keys and values are one, and a rank may have a part of it. What is
orthogonalized are a checkpoint's tensors, which the rules of the weight map find in parameters: each is gathered from
its tensor-parallel ranks, whole on all of them, and each keeps its part of the result. So no layout changes a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from miles_local.muon import MOMENTUM, Steps
from miles_local.muon_options import LAYER

from miles_megatron import cpu
from miles_megatron.adam import AdamW, prepare
from miles_megatron.layer_wise import Share, shares
from miles_megatron.ownership import hf_shapes, hf_tensors, part_of
from miles_megatron.specs import Rule, WeightMap
from miles_megatron.weights import global_parameters, instances, of_all_experts

cpu.install()

from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig  # noqa: E402 - after install()
from megatron.core.utils import unwrap_model  # noqa: E402


@dataclass(frozen=True, slots=True)
class Matrices:
    """A parameter, as what Muon moves.

    Args:
        kind: its name, less an expert's number: experts of a layer are orthogonalized together.
        parameter: the model's, which says how it is cut.
    """

    kind: str
    parameter: torch.nn.Parameter
    rule: Rule
    weight_map: WeightMap

    def whole(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Of this rank's part of what has the parameter's shape: whole matrices [outputs, inputs].

        What an expert has of one layer is one matrix, as transformers stacks them; elsewhere each tensor is.
        """
        tensors = hf_tensors(self.rule, self.parameter, self.weight_map, part)
        return [torch.cat(tensors)] if self.rule.experts else tensors

    def part(self, whole: Sequence[torch.Tensor]) -> torch.Tensor:
        """The inverse of `whole`."""
        shapes = hf_shapes(self.rule, self.parameter, self.weight_map)
        tensors = whole[0].split([shape[0] for shape in shapes]) if self.rule.experts else whole
        return part_of(self.rule, tensors, self.parameter, self.weight_map)


def matrices_of(chunks: Sequence[torch.nn.Module]) -> dict[torch.Tensor, Matrices]:
    """By what an optimizer updates, what Muon moves: by the checkpoint's names what the trainer fsdp chooses, matrices
    of numbered layers, routers and adapters included."""
    weight_map = unwrap_model(chunks[0]).weight_map
    rules = {ours: rule for ours, rule, names in instances(weight_map)
             if all(LAYER.search(one) and (rule.experts or one.endswith(".weight")) for one in names)}
    return {getattr(one, "main_param", one): Matrices(of_all_experts(name), one, rules[name], weight_map)
            for name, one in global_parameters(chunks).items() if name in rules and one.ndim == 2}


class Muon(AdamW):
    """AdamW, but that `matrices` are moved by Muon; their state is one momentum."""

    def __init__(self, groups: Iterable[dict], matrices: Mapping[torch.Tensor, Matrices], steps: Steps):
        super().__init__(groups)
        self._matrices, self._steps = matrices, steps

    def moments(self, parameter: torch.Tensor) -> tuple[str, ...]:
        """See AdamW."""
        return (MOMENTUM,) if parameter in self._matrices else super().moments(parameter)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update from the parameters' gradients; tensor-parallel ranks call it together."""
        groups = self.param_groups
        with self._steps.products():
            for group in groups:
                self._move(group)
        self.param_groups = [{**group, "params": [one for one in group["params"] if one not in self._matrices]}
                             for group in groups]
        try:
            super().step()
        finally:
            self.param_groups = groups

    def _move(self, group: dict) -> None:
        kinds: dict[str, list[torch.Tensor]] = {}
        for one in group["params"]:
            if one in self._matrices and one.grad is not None:
                kinds.setdefault(self._matrices[one].kind, []).append(one)
        for alike in kinds.values():
            wholes = zip(*(self._matrices[one].whole(self._ahead(one)) for one in alike), strict=True)
            directions = [self._direction(torch.stack(each)) for each in wholes]
            for one, *direction in zip(alike, *directions, strict=True):
                one.mul_(1 - group["lr"] * group["weight_decay"])
                one.add_(self._matrices[one].part(direction), alpha=-group["lr"])

    def _ahead(self, parameter: torch.Tensor) -> torch.Tensor:
        state = prepare(self, parameter)
        state["step"] += 1  # Megatron saves one for all parameters
        return self._steps.ahead(state[MOMENTUM], parameter.grad)

    def _direction(self, matrices: torch.Tensor) -> torch.Tensor:
        """[experts, outputs, inputs], in float32."""
        return self._steps.orthogonalized(matrices).float() * self._steps.scale(*matrices.shape[1:])


def divided(chunks: Sequence[torch.nn.Module]) -> list[Share]:
    """Parameters by the bytes of their state: a momentum or two moments, and a master of what is not in float32."""
    matrices = matrices_of(chunks)
    return shares(chunks, lambda one: one.numel() * ((1 if one in matrices else 2) + (one.dtype != torch.float32)))


def take_over(optimizer: MegatronOptimizer, chunks: Sequence[torch.nn.Module], settings: OptimizerConfig) -> None:
    """Put a Muon in the place of the AdamW in each of Megatron's optimizers, of which none is distributed."""
    matrices, steps = matrices_of(chunks), Steps.of(settings)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is not None:
            part.optimizer = Muon(part.optimizer.param_groups, matrices, steps)
