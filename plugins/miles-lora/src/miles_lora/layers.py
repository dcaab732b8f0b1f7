"""Adapters on Megatron's linear layers: y = W x + scale B A x, W frozen (Hu et al., arXiv:2106.09685, section 4.1).

The rank is small, so what travels between tensor-parallel ranks is what lies between A and B:

    layer cut along its outputs    A whole on every rank, B cut; A x of a sequence's part is gathered
    ... within a group of heads    B whole, too, as a rank has no even share of q, k and v: it takes its rows of all
    layer cut along its inputs     A cut, B whole on every rank; the parts of A x are added up
    layer that is not cut          A and B whole on every rank, for the rank's part of the sequence: nothing travels
    an expert                      the same, but the dispatcher of tokens gathers and adds up: nothing is left to do

Where a rank's gradient of what is whole on every rank is a part of it, the parts are added up: with Megatron's own sum
over the parameters of sequence-parallel layers, or in the backward pass (experts). What all experts of a layer share
(`Target.outer`) is whole on every rank of the stage, and every rank has a part of its gradient: that of its experts,
its rows and its part of the layer. To Megatron it is therefore no expert's, but of a sequence-parallel dense layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_lowercase
from typing import Any

import torch
import torch.nn.functional as F
from miles_megatron import cpu, tensor_merges
from miles_megatron.recurrent import apart
from miles_megatron.specs import WeightMap
from miles_megatron.weights import of_all_experts

from miles_lora.peft import drawn
from miles_lora.targets import Target

cpu.install()

from megatron.core import tensor_parallel  # noqa: E402 - after install()
from megatron.core.dist_checkpointing.mapping import ShardedStateDict  # noqa: E402
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes  # noqa: E402
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory  # noqa: E402
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint  # noqa: E402

COLUMN, ROW, WHOLE = "column", "row", "whole"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a linear layer stands among the ranks.

    Args:
        kind: COLUMN or ROW, cut along its outputs or its inputs, or WHOLE.
        group: its tensor-parallel ranks.
        expert: tokens are brought and results added up by the dispatcher.
        sequence: its input, or output, is a part of the sequence.
    """

    kind: str
    group: torch.distributed.ProcessGroup
    expert: bool
    sequence: bool

    @property
    def size(self) -> int:
        return self.group.size()


class Adapters(torch.nn.Module):
    """The adapters of one linear layer: of each part NAME_A [r, inputs] and NAME_B [outputs, r].

    Args:
        weight: [outputs, inputs] of the layer, of which this rank has its part.
        name: of the layer, over the whole model: with the seed it decides what A starts as, under any layout.
        rows: of each part of the layer on this rank; of all ranks where they share keys.
        outer: holds what all experts of a layer share, and gets it from the first.
    """

    def __init__(self, target: Target, weight: torch.Tensor, place: Place, name: str, rows: Sequence[int],
                 weight_map: WeightMap, rank: int, scale: float, seed: int, outer: torch.nn.Module | None = None):
        super().__init__()
        self._outer = (outer,) if outer is not None else ()  # whose parameters are not this module's
        self.target, self.place, self.rows, self.scale = target, place, tuple(rows), scale
        self.weight_map = weight_map
        self.shares_keys = shares_keys(target, place, weight_map)
        cut = place.kind == ROW
        for part, count in zip(target.parts, rows, strict=True):
            if part not in target.adapted:
                continue
            drawn_by = of_all_experts(name) if target.outer == "A" else name
            first = _drawn(rank, weight.shape[1], place if cut else None, f"{seed}/{drawn_by}/{part}", weight)
            self._add(f"{part}_A", first, weight, whole=not cut, axis=1)
            self._add(f"{part}_B", weight.new_zeros(count, rank), weight, axis=0,
                      whole=place.kind != COLUMN or self.shares_keys)

    def _add(self, name: str, value: torch.Tensor, weight: torch.Tensor, whole: bool, axis: int) -> None:
        holder = self._outer[0] if self._outer and name.endswith(self.target.outer) else self
        if name in holder._parameters:  # another expert's, too
            return
        parameter: Any = torch.nn.Parameter(value)  # Megatron reads attributes of it
        set_tensor_model_parallel_attributes(parameter, not whole, axis, 1)
        parameter.allreduce = holder is not self or getattr(weight, "allreduce", True)
        summed = self.shares_keys and axis == 0 or holder is self and self.place.expert  # in the backward pass
        parameter.sequence_parallel = whole and self.place.sequence and not summed
        holder.register_parameter(name, parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] of this rank -> [..., outputs] of this rank, to be added to the layer's."""
        place = self.place
        pairs = {name: one for part in (self, *self._outer) for name, one in part.named_parameters(recurse=False)}
        names = self.target.adapted
        first = [self._of_all(pairs[f"{name}_A"], COLUMN) for name in names]
        between = F.linear(x, torch.cat(first) if len(first) > 1 else first[0])
        if place.size > 1 and not place.expert and place.kind != WHOLE:
            between = _travelled(between, place)
        if self.shares_keys:
            return self.scale * F.linear(between, self._rows_of_all({name: pairs[f"{name}_B"] for name in names}))
        inner = dict(zip(names, between.split([len(one) for one in first], -1), strict=True))
        outputs = [
            F.linear(inner[name], self._of_all(pairs[f"{name}_B"], ROW)) if name in inner
            else between.new_zeros(*between.shape[:-1], count)
            for name, count in zip(self.target.parts, self.rows, strict=True)
        ]  # fmt: skip
        return self.scale * self._joined(outputs)

    def _rows_of_all(self, second: dict[str, torch.Tensor]) -> torch.Tensor:
        """This rank's rows of the Bs of all parts, joined as the layer's weight is: [rows, r x parts], each B in the
        columns of its own A x. Their gradients are the ranks' sum."""
        place, first = self.place, 0
        width = sum(one.shape[1] for one in second.values())
        blocks = []
        for part, count in zip(self.target.parts, self.rows, strict=True):
            if (one := second.get(part)) is None:
                blocks.append(next(iter(second.values())).new_zeros(count, width))
                continue
            one = tensor_parallel.copy_to_tensor_model_parallel_region(one, group=place.group)
            blocks.append(F.pad(one, (first, width - first - one.shape[1])))
            first += one.shape[1]
        return tensor_merges.join(self.target.rule, blocks, self.weight_map).chunk(place.size)[place.group.rank()]

    def _of_all(self, parameter: torch.Tensor, kind: str) -> torch.Tensor:
        """What is whole on every rank of an expert gets the sum of their gradients."""
        place = self.place
        if not place.expert or place.size == 1 or place.kind != kind or self._outer:
            return parameter
        return tensor_parallel.copy_to_tensor_model_parallel_region(parameter, group=place.group)

    def _joined(self, outputs: list[torch.Tensor]) -> torch.Tensor:
        """In the order of the layer's own outputs, which is that of its weight's rows."""
        rule = self.target.rule
        if len(outputs) == 1:
            return outputs[0]
        if rule.join == "rows":
            return torch.cat(outputs, -1)
        return tensor_merges.join(rule, [one.movedim(-1, 0) for one in outputs], self.weight_map).movedim(0, -1)

    def entries(self, prefix: str, offsets: tuple[Any, ...], dp_cp_group: Any) -> ShardedStateDict:
        """Where they lie in a torch_dist checkpoint."""
        own: dict[str, Any] = dict(self.named_parameters(recurse=False))
        axes = {name: one.partition_dim for name, one in own.items() if one.tensor_model_parallel}
        sharded = make_sharded_tensors_for_checkpoint(self.state_dict(prefix="", keep_vars=True), prefix, axes, offsets,
                                                    tp_group=self.place.group, dp_cp_group=dp_cp_group)
        if self.target.rule.join == "halves" and self.place.size > 1:
            for key in (f"{prefix}{part}_B" for part in self.target.adapted):
                sharded[key] = apply_swiglu_sharded_factory(sharded[key], offsets, False)
        for number, part in enumerate(self.target.parts if self.target.rule.join == "sections" else ()):
            if (key := f"{prefix}{part}_B") in sharded:
                cut = tensor_merges.pieces(self.target.rule, own[f"{part}_B"], number)
                sharded[key] = apart(sharded[key], ascii_lowercase[:len(cut)], tuple(map(len, cut)))
        return sharded


def shares_keys(target: Target, place: Place, weight_map: WeightMap) -> bool:
    """Whether a rank has rows of a group of heads that are no even share of each of the layer's parts."""
    ranks = place.size if place.kind == COLUMN else 1
    return len(target.parts) > 1 and not tensor_merges.whole_groups(target.rule, weight_map, ranks)


def _drawn(rank: int, inputs: int, place: Place | None, name: str, like: torch.Tensor) -> torch.Tensor:
    """What A starts as, [rank, inputs], or this rank's part of it."""
    ranks = 1 if place is None else place.size
    if like.is_meta:
        return like.new_empty(rank, inputs)
    whole = drawn(rank, inputs * ranks, name)
    part = whole if place is None else whole.chunk(ranks, 1)[place.group.rank()]
    return part.to(like.device, like.dtype)


def _travelled(between: torch.Tensor, place: Place) -> torch.Tensor:
    """A x, of all of the sequence before a B that is cut, or of all inputs after an A that is."""
    if place.kind == COLUMN:
        if place.sequence:
            return tensor_parallel.gather_from_sequence_parallel_region(between, group=place.group)
        return tensor_parallel.copy_to_tensor_model_parallel_region(between, group=place.group)
    if place.sequence:
        return tensor_parallel.reduce_scatter_to_sequence_parallel_region(between, group=place.group)
    return tensor_parallel.reduce_from_tensor_model_parallel_region(between, group=place.group)
