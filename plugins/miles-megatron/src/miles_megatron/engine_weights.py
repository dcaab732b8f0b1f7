"""Bytes of an engine's weights and of its KV cache, from config.json alone. No torch here.

What is quantised is what `quantization_config` says: how many bytes a weight has with its share of the scales, and
which modules stay as they are. A name of one module stands for all of its kind.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import replace

from miles_core.config.load import config_json
from miles_core.config.tables import RunConfig
from miles_megatron.estimate import ModelDimensions, mixing, parameters
from miles_megatron.heads import heads_of, mean_ffn

_KINDS = {
    "attention": ("self_attn.o_proj", True), "dense": ("mlp.down_proj", False),
    "shared": ("mlp.shared_experts.down_proj", True), "experts": ("mlp.experts.0.down_proj", True),
}
"""Kind -> one of its modules, and whether the last layer has it rather than the first."""


def weights(config: RunConfig, model: ModelDimensions) -> float:
    """Bytes of all weights that an engine serves."""
    size = model.size
    whole = replace(model.layout, tensor=1, pipeline=1, expert=1, expert_tensor=1)
    dense, experts = parameters(replace(model, layout=whole), size.layers, True, True)
    value = {"float32": 4}.get(str(config.surface("server").get("dtype") or config.rollout.engine_dtype), 2)
    each = {
        "attention": size.layers * sum(mixing(size)),
        "dense": (size.mlps - size.sparse) * size.matrices * size.hidden * mean_ffn(size),
        "shared": size.sparse * size.matrices * size.hidden * (size.shared_ffn or 0), "experts": experts,
    }
    stated = quantization(config)
    rounded = bytes_of(stated) if stated else None
    total = value * (dense + experts)
    for kind, count in each.items():
        module, last = _KINDS[kind]
        name = f"model.layers.{size.layers - 1 if last else 0}.{module}"
        if rounded is not None and not _kept(name, stated):
            total -= count * (value - rounded)
    return total


def quantization(config: RunConfig) -> Mapping[str, object] | None:
    """What config.json of --hf-checkpoint says of it."""
    quantization_config = (config_json(config)[1] or {}).get("quantization_config")
    return quantization_config if isinstance(quantization_config, Mapping) else None


def bytes_of(stated: Mapping[str, object]) -> float | None:
    """Of one quantised weight, its share of the scales included; None where this is not known."""
    method = stated.get("quant_method")
    if method == "fp8":
        rows, columns = stated.get("weight_block_size") or (128, 128)
        return 1 + 4 / (rows * columns)
    if method == "mxfp8":
        return 1 + 1 / 32
    if method == "mxfp4":
        return 0.5 + 1 / 32
    if method in ("gptq", "awq"):
        bits, group = stated.get("bits", 4), max(int(stated.get("group_size", 128)), 1)
        return bits / 8 * (1 + 1 / group) + 2 / group
    groups = list((stated.get("config_groups") or {}).values())
    weight = (groups[0].get("weights") or {}) if groups else {}
    bits, group = weight.get("num_bits"), weight.get("group_size")
    if not isinstance(bits, int):
        return None
    return bits / 8 + ((1 if weight.get("type") == "float" else 2) / group if group else 0)


def cache(config: RunConfig, model: ModelDimensions) -> float:
    """Bytes of a token's keys and values on one GPU of an engine; a latent is on each."""
    size, servers = model.size, config.surface("server")
    value = 1 if str(servers.get("kv_cache_dtype", "")).startswith("fp8") else 2
    if size.rank:
        return value * size.full * (size.rank + size.turned)
    return value * sum(one.layers * 2 * one.head_dim * max(one.groups / config.perf.rollout_num_gpus_per_engine, 1)
                       for one in heads_of(size) if one.made)


def _kept(module: str, stated: Mapping[str, object]) -> bool:
    """Whether a module is one of those that are not quantised: names, "re:" expressions, or beginnings with "*"."""
    for one in (*(stated.get("ignore") or ()), *(stated.get("modules_to_not_convert") or ())):
        if re.match(one[3:], module) if one.startswith("re:") else fnmatch.fnmatch(module, f"{one}*"):
            return True
    return False
