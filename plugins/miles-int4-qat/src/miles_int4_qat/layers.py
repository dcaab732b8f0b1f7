"""The model's layers that compute with rounded weights."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from miles_megatron import cpu
from miles_megatron.specs import WeightMap
from miles_megatron.substitute import substitute_all
from miles_megatron.weights import global_parameters, instances

from miles_core.errors import ConfigError
from miles_int4_qat.names import check_width
from miles_int4_qat.quantise import fake_quantised

cpu.install()

from megatron.core import parallel_state  # noqa: E402 - after install()


def round_weights(chunk: torch.nn.Module, weight_map: WeightMap, names: Collection[str], group_size: int,
                  dtype: torch.dtype, rounds: Callable[[], bool]) -> None:
    """Have layers read rounded weights; the parameters stay.

    A rank rounds its own part: groups lie along the input axis, which tensor parallelism cuts in the second layer of
    an MLP and behind attention, so they have to divide the part. Rows may be cut and ordered in any way.

    Args:
        names: Hugging Face names of the weights.
        dtype: of the scales.
        rounds: whether to, asked at every forward.

    Raises:
        ConfigError: groups do not divide this rank's part of an input axis, or a parameter is made of weights of which
            only some are int4.
    """
    wanted = {}
    for ours, _, theirs in instances(weight_map):
        inside = [name for name in theirs if name in names]
        if inside and len(inside) < len(theirs):
            raise ConfigError("weights that the trainer keeps as one are not all int4",
                              code="int4-merged-weights-differ",
                              got=f"{inside[0]} is, {next(name for name in theirs if name not in names)} is not",
                              who="quantization_config of --hf-checkpoint", fix="quantise all of them, or none")
        if inside:
            wanted[ours] = inside[0]
    known = {id(parameter): wanted[ours] for ours, parameter in global_parameters(chunk).items() if ours in wanted}

    def function(*weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return fake_quantised(group_size, dtype, *weights) if rounds() else weights

    for module in chunk.modules():
        rounded = {name: parameter for name, parameter in module._parameters.items()
                if parameter is not None and id(parameter) in known}
        for parameter in rounded.values():
            check_width(known[id(parameter)], parameter.shape[-1], group_size, _cut(parameter))
        if rounded:
            substitute_all(module, partial(function), tuple(rounded))


def _cut(parameter: Any) -> int:
    """Ranks among which the input axis is cut."""
    if not getattr(parameter, "tensor_model_parallel", False) or parameter.partition_dim != parameter.dim() - 1:
        return 1
    group = (parallel_state.get_tensor_model_parallel_group() if getattr(parameter, "allreduce", True)
             else parallel_state.get_expert_tensor_parallel_group())
    return group.size()
