"""The stream of weights: plain weights become packed ones, and plain again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import torch
from miles_megatron.disk_names import changed
from miles_megatron.specs import WeightMap

from miles_core.errors import EngineError
from miles_int4_qat import quantise
from miles_int4_qat.names import PARTS

Stream = Iterable[tuple[str, torch.Tensor]]


def packed(stream: Stream, names: Collection[str], group_size: int, dtype: torch.dtype | None
           ) -> Iterator[tuple[str, torch.Tensor]]:
    """X.weight as X.weight_packed [out, in / 8] int32, X.weight_scale [out, in / group_size] and X.weight_shape [2].

    Args:
        names: of the weights that are packed; others pass.
        dtype: of the scales; None for each weight's own.
    """
    for name, weight in stream:
        if name not in names:
            yield name, weight
            continue
        values, scale = quantise.quantise(weight, group_size, dtype or weight.dtype)
        yield f"{name}_packed", quantise.pack(values)
        yield f"{name}_scale", scale
        yield f"{name}_shape", torch.tensor(weight.shape, dtype=torch.int64, device=weight.device)


def rounded(stream: Stream, weight_map: WeightMap, names: Collection[str], group_size: int, dtype: torch.dtype
            ) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights that `packed` stands for, under their names and in their dtypes; experts also within one tensor.

    Args:
        names: by the rules of the weight map.
    """
    def change(name: str, weight: torch.Tensor) -> torch.Tensor:
        return quantise.rounded(weight, group_size, dtype) if name in names else weight

    return changed(stream, weight_map, change)


def unpacked(stream: Stream) -> Iterator[tuple[str, torch.Tensor]]:
    """The inverse of `packed`, in the scales' dtype; the three tensors of a weight may come in any order.

    Raises:
        EngineError: a weight of which a part is missing, or has another shape than the others.
    """
    pending: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in stream:
        weight, _, kind = name.rpartition("_")
        if not weight.endswith(".weight") or kind not in PARTS:
            yield name, tensor
            continue
        parts = pending.setdefault(weight, {})
        parts[kind] = tensor.clone()  # a sender may refill its memory
        if len(parts) == len(PARTS):
            yield weight, _whole(weight, **pending.pop(weight))
    if pending:
        name, parts = next(iter(pending.items()))
        raise EngineError("a packed weight is incomplete", got=f"{name}: {', '.join(parts)} and no "
                          f"{', '.join(kind for kind in PARTS if kind not in parts)}", code="int4-weight-incomplete",
                          fix="send all three tensors of a weight")


def _whole(name: str, packed: torch.Tensor, scale: torch.Tensor, shape: torch.Tensor) -> torch.Tensor:
    rows, width = shape.tolist()
    fits = list(packed.shape) == [rows, width // quantise.NIBBLES] and scale.shape[0] == rows
    if not fits or scale.shape[1] == 0 or width % scale.shape[1]:
        raise EngineError(f"the parts of packed weight {name} do not match", code="int4-weight-parts-differ",
                          got=f"shape {[rows, width]}, packed {list(packed.shape)}, scales {list(scale.shape)}",
                          fix="convert the checkpoint again")
    return quantise.dequantise(quantise.unpack(packed), scale)
