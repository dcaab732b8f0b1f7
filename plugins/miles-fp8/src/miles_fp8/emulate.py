"""FP8 without its kernels: linear layers round their operands as the kernels do; gradients pass straight through.

A product of FP8 matrices is exact in float32 but for the order of its sums, so that rounding the operands is all there
is to emulate. Forward: activations by rows, weights by blocks of this rank's parameter, as Transformer Engine cuts it.
Backward: the output's gradient is rounded by rows and meets the rounded weight (for the input) and the rounded input
(for the weight); Transformer Engine rounds these two once more along the other axis, which is not emulated.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, cast

import torch
from miles_megatron import cpu
from miles_megatron.substitute import substitute

from miles_fp8 import nvfp4
from miles_fp8.recipe import ROWS, Tiles, tiles
from miles_fp8.rounding import rounded

cpu.install()

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
    """

    recipe: str
    layers: frozenset[int]
    gradients: torch.dtype
    activations: bool = True


class _Rounded(torch.autograd.Function):
    """x -> x as FP8 holds it; the gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tiles: Tiles) -> torch.Tensor:
        return rounded(x, tiles)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _FourBits(torch.autograd.Function):
    """A weight as NVFP4 holds it, by the scales of the checkpoint's tensors; the gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, part: torch.Tensor | None, group: Any) -> torch.Tensor:
        return nvfp4.rounded(x, nvfp4.of_tensors(x, part, group))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad, None, None


class _RoundedGradient(torch.autograd.Function):
    """x -> x; the gradient as FP8 holds it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tiles: Tiles, dtype: torch.dtype) -> torch.Tensor:
        ctx.tiles, ctx.dtype = tiles, dtype
        return x.clone()  # a view could not have a bias added in place, as Megatron does to the output of experts

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return rounded(grad, ctx.tiles, ctx.dtype), None, None


def emulate(chunk: torch.nn.Module, emulation: Emulation) -> int:
    """Have the linear layers of a model's decoder layers compute as if in FP8; returns how many there are.

    Embedding, router, norms and output layer are none of them. Layers for multi-token prediction are rounded with the
    decoder's, whatever `layers` says.
    """
    count = 0
    layers = [layer for layer in cast("Any", chunk).decoder.layers if layer.layer_number - 1 in emulation.layers]
    for part in (*layers, *getattr(getattr(chunk, "mtp", None), "layers", ())):
        for name, module in part.named_modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                _round(module, emulation, name.rpartition(".")[2])
                count += 1
                _tell(name, module, emulation)
    return count


def _round(module: Any, emulation: Emulation, end: str) -> None:
    weight, row = tiles(emulation.recipe), tiles(emulation.recipe, ROWS)
    if weight.four_bits:
        part, group = _part(module, end), getattr(module, "tp_group", None)
        substitute(module, lambda tensor: _FourBits.apply(tensor, part, group))
    else:
        substitute(module, lambda tensor: _Rounded.apply(tensor, weight))
    if not emulation.activations:
        return
    module.register_forward_pre_hook(lambda _, inputs: (_Rounded.apply(inputs[0], row), *inputs[1:]))
    module.register_forward_hook(
        lambda _, __, out: (_RoundedGradient.apply(out[0], row, emulation.gradients), *out[1:]))


def _part(module: Any, end: str) -> torch.Tensor | None:
    """Which of the checkpoint's tensors each row of a fused parameter belongs to; None where it is one."""
    rows, config = module.weight.shape[0], module.config
    device = cpu.device()
    if end == "linear_fc1" and config.gated_linear_unit:
        return torch.arange(2, device=device).repeat_interleave(rows // 2)
    each = config.kv_channels * torch.tensor([config.num_attention_heads // config.num_query_groups, 1, 1])
    if end != "linear_qkv" or rows % int(each.sum()):
        return None
    return torch.arange(3).repeat_interleave(each).repeat(rows // int(each.sum())).to(device)


def _tell(name: str, module: Any, emulation: Emulation) -> None:
    """Blocks of a fused or cut parameter are those of the checkpoint's tensors only where their edges meet."""
    blocks, parts, config = tiles(emulation.recipe), {"linear_qkv": 3, "linear_fc1": 2}, module.config
    end = name.rpartition(".")[2]
    heights = {"linear_qkv": config.kv_channels, "linear_fc1": module.weight.shape[0] // 2}
    meets = blocks.rows is not None and heights.get(end, 0) % blocks.rows == 0 and (
        not isinstance(module, RowParallelLinear) or config.tensor_model_parallel_size == 1
        or module.weight.shape[1] % blocks.columns == 0)
    if not meets and (end in parts or isinstance(module, RowParallelLinear)):
        logger.debug("%s: the blocks of %s here are not those of the tensors that engines hold", name, end)
