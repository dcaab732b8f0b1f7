"""The stream of weights on its way to engines: tensors become FP8 and their scales; and back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from miles_megatron.disk_names import changed, split
from miles_megatron.specs import WeightMap

from miles_core.errors import EngineError
from miles_fp8 import nvfp4
from miles_fp8.recipe import FOUR_BITS, SCALE_OF_SCALES, SCALES, WEIGHTS, Held, Tiles
from miles_fp8.rounding import dequantise, quantise, rounded, to_bytes

Stream = Iterator[tuple[str, torch.Tensor]]


def quantised(stream: Stream, fp8_format: Held) -> Stream:
    """Each weight that `fp8_format` has in FP8, followed by its scale; every other tensor as it is."""
    for name, tensor in stream:
        if not fp8_format.quantises(name, tensor.shape):
            yield name, tensor
            continue
        if fp8_format.tiles.four_bits:
            packed, scale, whole = nvfp4.quantise(tensor)
            for one in (packed, scale, whole):
                vars(one)["keeps_dtype"] = True
            yield from ((name, packed), (fp8_format.scale(name), scale),
                        (name.removesuffix("weight") + SCALE_OF_SCALES, whole))
            continue
        weight, scale = quantise(tensor, fp8_format.tiles)
        scale = to_bytes(scale) if fp8_format.recipe == "mxfp8" else scale
        vars(scale)["keeps_dtype"] = True  # also where the trainer's float32 is sent as another dtype
        yield name, weight
        yield fp8_format.scale(name), scale


def apart(stream: Stream, fp8_format: Held, weight_map: WeightMap, *, whole: bool) -> Stream:
    """Experts that lie in one tensor, where FP8 is for them: each under a name of its own.

    Args:
        whole: the engine knows them in one tensor alone; it then gets that, rounded.
    """
    def taken(name: str) -> bool:
        return name.endswith(".weight") and fp8_format.quantises(name, (1, FOUR_BITS.columns or 1))

    if not whole:
        return split(stream, weight_map, taken)
    return changed(stream, weight_map, lambda name, part: rounded(part, fp8_format.tiles) if taken(name) else part,
                   packed_alone=True)


def plain_of_four_bits(stream: Stream) -> Stream:
    """The inverse of `quantised` for NVFP4; a weight and its scales may come in any order and apart.

    Raises:
        EngineError: a weight without its scales.
    """
    ends = ("weight", SCALES[1], SCALE_OF_SCALES)
    pending: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in stream:
        module, _, end = name.rpartition(".")
        if end not in ends or (end == "weight" and tensor.dtype != torch.uint8):
            yield name, tensor
            continue
        parts = pending.setdefault(module, {})
        parts[end] = tensor
        if len(parts) == len(ends):
            yield f"{module}.weight", nvfp4.dequantise(parts["weight"], parts[SCALES[1]], parts[SCALE_OF_SCALES])
            del pending[module]
    if pending:
        raise EngineError("NVFP4 weights came without their scales", got=f"{len(pending)}, such as {min(pending)}",
                          fix="send weight, weight_scale and weight_scale_2 of each, or fetch the checkpoint again",
                          code="nvfp4-scales-missing")


def rounding_inputs(stream: Stream, fp8_format: Held) -> Stream:
    """Plain tensors; those that were in FP8 say that their inputs are rounded as well, each row by itself.

    FP8 kernels of engines find the scales of activations as they go. A row must not depend on those beside it, so where
    a recipe has one scale for all, or NVFP4's scale of scales, a row here has its own.
    """
    row = replace(fp8_format.tiles, rows=1)

    def round_inputs(x: torch.Tensor) -> torch.Tensor:
        if not row.four_bits:
            return rounded(x, row)
        flat = x.reshape(-1, x.shape[-1])
        number = torch.arange(len(flat), device=x.device)
        return nvfp4.rounded(flat, nvfp4.of_tensors(flat, number, len(flat))).view(x.shape)

    for name, tensor in stream:
        # Experts in one tensor are not called weights there; what holds for a matrix of theirs holds for all.
        matrix = name if tensor.dim() == 2 else f"{name}.weight"
        if fp8_format.quantises(matrix, tensor.shape[-2:]):
            vars(tensor)["round_inputs"] = round_inputs
        yield name, tensor


def plain(stream: Stream, tiles: Tiles = WEIGHTS["blockwise"]) -> Stream:
    """The inverse, float32 for what was FP8; a weight and its scale may come in any order and apart.

    Args:
        tiles: of scales that are float32 matrices.

    Raises:
        EngineError: an FP8 weight without a scale.
    """
    weights: dict[str, torch.Tensor] = {}
    scales: dict[str, tuple[str, torch.Tensor]] = {}
    others: set[str] = set()
    for name, tensor in stream:
        if tensor.dtype == torch.float8_e4m3fn:
            module = name.removesuffix("weight")
            weights[module] = tensor
        elif name.endswith(SCALES):
            module = name.rpartition(".")[0] + "."
            if module in others:  # the scale of something else than FP8
                yield name, tensor
                continue
            scales[module] = name, tensor
        else:
            yield name, tensor
            module = name.removesuffix("weight")
            others.add(module)
            if module in scales:
                yield scales.pop(module)
            continue
        if module in weights and module in scales:
            weight, (_, scale) = weights.pop(module), scales.pop(module)
            cut = WEIGHTS["mxfp8"] if scale.dtype == torch.uint8 else tiles
            yield f"{module}weight", dequantise(weight, scale, cut)
    if weights:
        raise EngineError("FP8 weights came without their scales", code="fp8-scales-not-sent",
                          got=f"{len(weights)}, such as {min(weights)}weight",
                          fix="send weight and weight_scale_inv of each, or fetch the checkpoint again")
    yield from scales.values()
