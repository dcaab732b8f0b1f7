"""Put adapters on the layers of a model's part on this rank, and freeze all else."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from miles_megatron import cpu, tensor_merges
from miles_megatron.specs import WeightMap
from miles_megatron.weights import global_parameters, instances

from miles_core.errors import ConfigError
from miles_lora.layers import COLUMN, ROW, WHOLE, Adapters, Place, shares_keys
from miles_lora.targets import Switch, Target

cpu.install()

from megatron.core import parallel_state  # noqa: E402 - after install()
from megatron.core.dist_checkpointing.mapping import ShardedStateDict  # noqa: E402
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding  # noqa: E402
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear  # noqa: E402
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint  # noqa: E402

_OF_GROUP = re.compile(r"weight\d+$")


def attach(chunk: torch.nn.Module, weight_map: WeightMap, chosen: Sequence[Target], rank: int, scale: float, seed: int,
           switch: Switch) -> None:
    """Freeze a part of a model and add adapters.

    Args:
        weight_map: of the whole model.

    Raises:
        ConfigError: a layer that can have none, here.
    """
    for parameter in chunk.parameters():
        parameter.requires_grad_(False)
    owners = {id(one): (prefix, module, name) for prefix, module in chunk.named_modules()
              for name, one in module.named_parameters(recurse=False)}
    parameters = global_parameters(chunk)
    grouped: dict[str, dict[str, list[Adapters]]] = {}
    shared: dict[str, torch.nn.ModuleDict] = {}
    for target in chosen:
        for name, _, _ in instances(replace(weight_map, rules=(target.rule,))):
            if (weight := parameters.get(name)) is None:  # another rank's
                continue
            prefix, module, own = owners[id(weight)]
            place = _place(module, target, prefix)
            rows = _rows(target, weight, place, weight_map)
            outer = _outer(shared, target, prefix)
            made = Adapters(target, weight, place, name.removesuffix(".weight"), rows, weight_map, rank, scale, seed,
                            outer)
            if _OF_GROUP.match(own):
                experts, _, layer = prefix.rpartition(".")
                grouped.setdefault(experts, {}).setdefault(layer, []).append(made)
            else:
                _on_layer(module, made, switch)
    for prefix, layers in grouped.items():
        _on_group(chunk.get_submodule(prefix), layers, switch)
    for prefix, of_layers in shared.items():
        _on_experts(chunk.get_submodule(prefix), of_layers)


def _outer(shared: dict[str, torch.nn.ModuleDict], target: Target, name: str) -> torch.nn.Module | None:
    """Of the layer's experts what they share, by the name of a layer of theirs; None where each has its own."""
    if not target.outer:
        return None
    group, _, inside = name.rpartition(".experts.")
    of_layers, layer = shared.setdefault(f"{group}.experts", torch.nn.ModuleDict()), inside.rpartition(".")[2]
    if layer not in of_layers:
        of_layers[layer] = torch.nn.Module()
    return of_layers[layer]


def _place(module: Any, target: Target, name: str) -> Place:
    """
    Raises:
        ConfigError: a layer of another kind, or one whose cut nothing here knows.
    """
    kind = next((kind for kind, cls in _kinds() if isinstance(module, cls)), None)
    if kind == WHOLE and not getattr(module.weight, "tensor_model_parallel", False):
        return Place(kind, parallel_state.get_tensor_model_parallel_group(), False,
                     bool(getattr(module.weight, "sequence_parallel", False)))
    config: Any = getattr(module, "config", None)
    fix = f"add --exclude-modules {','.join(target.adapted)}"
    if kind in (None, WHOLE) or getattr(module, "gather_output", False):
        raise ConfigError(f"a layer of type {type(module).__name__} cannot have an adapter",
                          code="lora-layer-unsupported", who=name, fix=fix)
    if ".shared_experts." in name and config.moe_shared_expert_overlap:
        raise ConfigError("shared experts that compute beside the dispatcher cannot have an adapter", who=name,
                          fix=f"{fix}, or leave moe_shared_expert_overlap out", code="lora-shared-experts-unsupported")
    return Place(kind, getattr(module, "tp_group", None) or module._tp_group, bool(target.rule.experts),
                 bool(config.sequence_parallel))


def _kinds() -> Iterator[tuple[str, type]]:
    yield COLUMN, ColumnParallelLinear
    yield ROW, RowParallelLinear
    yield WHOLE, torch.nn.Linear
    if not cpu.no_transformer_engine():
        from megatron.core.extensions import transformer_engine as te

        yield from ((COLUMN, te.TEColumnParallelLinear), (ROW, te.TERowParallelLinear),
                    (COLUMN, te.TEColumnParallelGroupedLinear), (ROW, te.TERowParallelGroupedLinear))


def _rows(target: Target, weight: torch.Tensor, place: Place, weight_map: WeightMap) -> list[int]:
    """Of each of its parts on this rank; of all ranks where they share keys."""
    ranks = place.size if place.kind == COLUMN else 1
    shapes = tensor_merges.hf_shapes(target.rule, [len(weight) * ranks, weight.shape[1]], weight_map)
    return [rows // (1 if shares_keys(target, place, weight_map) else ranks) for rows, *_ in shapes]


def _on_layer(module: Any, adapters: Adapters, switch: Switch) -> None:
    """Have a linear layer add what its adapters give, and keep them in its checkpoints."""
    module.adapters = adapters
    forward = module.forward

    def adapted(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor | tuple[torch.Tensor, Any]:
        result = forward(x, *args, **kwargs)
        if not switch.on:
            return result
        return (result[0] + adapters(x), *result[1:]) if isinstance(result, tuple) else result + adapters(x)

    module.forward = adapted
    if adapters.place.kind == WHOLE:  # Megatron keeps such a layer with all that it holds
        return
    sharded = module.sharded_state_dict

    def entries(prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None) -> ShardedStateDict:
        # The layer's own would take what it does not know for the same on every rank.
        own = _without(f"{prefix}adapters.", sharded(prefix, sharded_offsets, metadata))
        return own | adapters.entries(f"{prefix}adapters.", sharded_offsets, metadata["dp_cp_group"])

    module.sharded_state_dict = entries


def _on_group(experts: Any, layers: Mapping[str, Sequence[Adapters]], switch: Switch) -> None:
    """The same for Transformer Engine's grouped experts; names and checkpoints are those of experts one by one."""
    experts.local_experts = torch.nn.ModuleList(torch.nn.Module() for _ in range(experts.num_local_experts))
    for name, each in layers.items():
        for expert, adapters in zip(experts.local_experts, each, strict=True):
            layer = torch.nn.Module()
            layer.adapters = adapters
            expert.add_module(name, layer)
        _on_grouped_layer(getattr(experts, name), each, switch)
    sharded = experts.sharded_state_dict

    def entries(prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None) -> ShardedStateDict:
        own = _without(f"{prefix}local_experts.", sharded(prefix, sharded_offsets, metadata))
        ranks, count = experts.ep_group, experts.num_local_experts
        for name, each in layers.items():
            for i, adapters in enumerate(each):
                offsets = (*sharded_offsets, (len(sharded_offsets), ranks.rank() * count + i, ranks.size() * count))
                where = f"{prefix}local_experts.{i}."
                sharded_entries = adapters.entries(f"{where}{name}.adapters.", offsets, metadata["dp_cp_group"])
                replace_prefix_for_sharding(sharded_entries, where, f"{prefix}experts.")
                for entry in sharded_entries.values():
                    entry.replica_id = (*entry.replica_id[:2], _expert_data_rank())
                own |= sharded_entries
        return own

    experts.sharded_state_dict = entries


def _on_experts(experts: Any, of_layers: torch.nn.ModuleDict) -> None:
    """Keep with a layer's experts what they share, and in its checkpoints as what every rank holds whole."""
    experts.adapters = of_layers
    sharded = experts.sharded_state_dict

    def entries(prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None) -> ShardedStateDict:
        own = _without(f"{prefix}adapters.", sharded(prefix, sharded_offsets, metadata))
        return own | make_sharded_tensors_for_checkpoint(
            of_layers.state_dict(prefix="", keep_vars=True), f"{prefix}adapters.", {}, sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(), dp_cp_group=metadata["dp_cp_group"])

    experts.sharded_state_dict = entries


def _on_grouped_layer(layer: Any, each: Sequence[Adapters], switch: Switch) -> None:
    forward = layer.forward

    def adapted(x: torch.Tensor, splits: Sequence[int], *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        output, bias = forward(x, splits, *args, **kwargs)
        return (output + one_by_one(each, x, splits) if switch.on else output), bias

    layer.forward = adapted


def one_by_one(each: Sequence[Adapters], x: torch.Tensor, splits: Sequence[int]) -> torch.Tensor:
    """What each expert's adapters give for its own rows.

    Args:
        x: [rows, inputs], the first expert's first.
        splits: rows of each.
    """
    return torch.cat([adapters(rows) for adapters, rows in zip(each, x.split(list(splits)), strict=True)])


def _expert_data_rank() -> int:
    return parallel_state.get_expert_data_parallel_rank()


def _without(prefix: str, entries: ShardedStateDict) -> ShardedStateDict:
    return {name: entry for name, entry in entries.items() if not name.startswith(prefix)}
