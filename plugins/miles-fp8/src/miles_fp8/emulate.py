"""FP8 without its kernels: linear layers round their operands as the kernels do; gradients pass straight through.

A product of FP8 matrices is exact in float32 but for the order of its sums, so that rounding the operands is all there
is to emulate. Forward: activations by rows, weights by blocks of this rank's share of a tensor of the checkpoint.
Transformer Engine cuts a parameter that joins several as one; the edges meet where their heights are whole blocks.
Backward: the output's gradient is rounded by rows and meets the rounded weight (for the input) and the rounded input
(for the weight); Transformer Engine rounds these two once more along the other axis, which is not emulated.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from miles_megatron import cpu
from miles_megatron.ownership import hf_shapes, part_of
from miles_megatron.specs import WeightMap
from miles_megatron.substitute import substitute
from miles_megatron.weights import global_parameters, instances

from miles_fp8 import nvfp4
from miles_fp8.precisions import emulated
from miles_fp8.recipe import NVFP4, ROWS, Tiles, tiles
from miles_fp8.rounding import rounded

cpu.install()

from megatron.core import parallel_state  # noqa: E402 - after install()
from megatron.core.quantization.quant_config import RecipeConfig  # noqa: E402 - after install()
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear  # noqa: E402 - after install()

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Emulation:
    """What is rounded, and how.

    Args:
        recipe: one of recipe.RECIPES, or NVFP4.
        layers: numbers, over the whole model, of the decoder layers that compute in FP8.
        gradients: the format of gradients.
        activations: whether activations and gradients are rounded as well as weights.
        modules: of which recipe single modules are, or none.
    """

    recipe: str
    layers: frozenset[int]
    gradients: torch.dtype
    activations: bool = True
    modules: RecipeConfig | None = None


class _Rounded(torch.autograd.Function):
    """x -> x as FP8 holds it, or several tensors that it joins, by their rows; the gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tiles: Tiles, joined: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        if not joined:
            return rounded(x, tiles)
        whole = torch.empty_like(x)
        for rows in joined:
            whole[rows] = rounded(x[rows], tiles)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad, None, None


class _FourBits(torch.autograd.Function):
    """A weight as NVFP4 holds it, by the scales of the checkpoint's tensors; the gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, part: torch.Tensor | None, parts: int, group: Any) -> torch.Tensor:
        return nvfp4.rounded(x, nvfp4.of_tensors(x, part, parts, group))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return grad, None, None, None


class _RoundedGradient(torch.autograd.Function):
    """x -> x; the gradient as FP8 holds it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tiles: Tiles, dtype: torch.dtype) -> torch.Tensor:
        ctx.tiles, ctx.dtype = tiles, dtype
        return x.clone()  # a view could not have a bias added in place, as Megatron does to the output of experts

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return rounded(grad, ctx.tiles, ctx.dtype), None, None


def emulate(chunk: torch.nn.Module, emulation: Emulation, weight_map: WeightMap | None = None) -> int:
    """Have the linear layers of a model's decoder layers compute as if in FP8; returns how many there are.

    Embedding, router, norms and output layer are none of them. Layers for multi-token prediction are rounded with the
    decoder's, whatever `layers` says.

    Args:
        weight_map: says which tensors of the checkpoint a parameter joins: each is rounded by itself, as engines do.
    """
    count, joined, names = 0, _rows(chunk, weight_map), {module: name for name, module in chunk.named_modules()}
    layers = [layer for layer in cast("Any", chunk).decoder.layers if layer.layer_number - 1 in emulation.layers]
    for part in (*layers, *getattr(getattr(chunk, "mtp", None), "layers", ())):
        for module in part.modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                recipe = emulated(emulation.modules, names[module], emulation.recipe)
                if recipe is None:
                    continue
                rows, own = joined.get(id(module.weight), []), replace(emulation, recipe=recipe)
                _round(module, own, rows)
                count += 1
                _tell(names[module], module.weight, own, rows)
    return count


def _round(module: Any, emulation: Emulation, joined: Sequence[torch.Tensor]) -> None:
    weight, row = tiles(emulation.recipe), tiles(emulation.recipe, ROWS)
    if weight.four_bits:
        group, part = getattr(module, "tp_group", None), None
        if joined:
            part = torch.empty(len(module.weight), dtype=torch.int64, device=module.weight.device)
            for number, rows in enumerate(joined):
                part[rows] = number
        substitute(module, lambda tensor: _FourBits.apply(tensor, part, len(joined), group))
    else:
        substitute(module, lambda tensor: _Rounded.apply(tensor, weight, joined))
    if not emulation.activations:
        return
    module.register_forward_pre_hook(lambda _, inputs: (_Rounded.apply(inputs[0], row), *inputs[1:]))
    module.register_forward_hook(
        lambda _, __, out: (_RoundedGradient.apply(out[0], row, emulation.gradients), *out[1:]))


def _rows(chunk: torch.nn.Module, weight_map: WeightMap | None) -> dict[int, list[torch.Tensor]]:
    """By the id of a parameter that joins several tensors of the checkpoint: the rows of each, in its order."""
    if weight_map is None:
        return {}
    rules, joined = {ours: rule for ours, rule, _ in instances(weight_map)}, {}
    for name, parameter in global_parameters(chunk).items():
        if (rule := rules.get(name)) is None or rule.join == "same" or parameter.dim() != 2:
            continue
        counts = [shape[0] for shape in hf_shapes(rule, parameter, weight_map)]
        numbers = torch.arange(sum(counts))[:, None].expand(-1, _ranks(parameter)).split(counts)
        here = part_of(rule, numbers, parameter, weight_map)[:, 0]
        ends = torch.searchsorted(here.sort()[0], torch.tensor(counts[:-1]).cumsum(0))
        joined[id(parameter)] = [*here.argsort().to(parameter.device).tensor_split(ends)]
    return joined


def _ranks(parameter: Any) -> int:
    """Tensor-parallel ranks among which a linear layer's parameter is cut; those of experts are others."""
    expert = not getattr(parameter, "allreduce", True)
    group = (parallel_state.get_expert_tensor_parallel_group if expert else
             parallel_state.get_tensor_model_parallel_group)()
    return group.size() if getattr(parameter, "tensor_model_parallel", False) else 1


def _tell(name: str, weight: Any, emulation: Emulation, rows: list[torch.Tensor]) -> None:
    """Blocks of a rank's share are those of the checkpoint's tensors only where their edges meet."""
    blocks = tiles(emulation.recipe)
    if _ranks(weight) == 1 or emulation.recipe == NVFP4:
        return
    shares, size = ((weight.shape[1],), blocks.columns) if weight.partition_dim else (map(len, rows), blocks.rows)
    if size is None or any(share % size for share in shares):
        logger.debug("%s: the blocks of this rank's share are not those of the tensors that engines hold", name)
