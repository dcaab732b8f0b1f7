"""The model against what a run says of it: [model] and config.json."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from miles_core.config.load import config_json, who
from miles_core.config.tables import RunConfig
from miles_core.errors import ConfigError
from miles_core.reading import parse_json

PLAIN = {
    "num_layers": "num_hidden_layers", "hidden_size": "hidden_size", "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads", "kv_channels": "head_dim", "layernorm_epsilon": "rms_norm_eps",
    "moe_ffn_hidden_size": "moe_intermediate_size", "moe_router_topk": "num_experts_per_tok",
    "share_embeddings_and_output_weights": "tie_word_embeddings", "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank", "qk_head_dim": "qk_nope_head_dim", "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim", "moe_router_num_groups": "n_group", "moe_router_group_topk": "topk_group",
    "moe_router_topk_scaling_factor": "routed_scaling_factor",
}  # fmt: skip
"""Fields of Megatron-core -> keys of config.json that mean the same in every family."""
WHOLE = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
         "max_position_embeddings")
FITTING = {"qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "llama", "mistral", "mixtral"}
"""Families whose model_type is how their architecture begins."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def check_model(config: RunConfig) -> None:
    """

    Raises:
        ConfigError: a constant that config.json contradicts, or a reference that is another model.
    """
    path, constants = config_json(config)
    if constants is None:
        return
    _kinds(path, constants)
    if not config.debug.debug_rollout_only:
        for field, key, stated in _constants(constants):
            value = config.surface("megatron").get(field)
            if value is not None and value != stated:
                raise ConfigError(f"{field} disagrees with the checkpoint, whose {key} is {stated}", got=value,
                                  who=f"{who(config, f'megatron.{field}')}, {path}",
                                  fix=f"leave {field} out, or use a checkpoint with that value")
        _reference(config, constants)


def _kinds(path: Path, constants: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: a value of config.json is of no kind that its key can have, or two keys name two models.
    """
    wanted = {key: ("a whole number from 1 on", type(constants.get(key)) is int and constants[key] >= 1)
              for key in WHOLE}
    ends = constants.get("eos_token_id")
    wanted["eos_token_id"] = ("a token's number, or a list of such", all(
        type(one) is int for one in (ends if isinstance(ends, list) else [ends])))
    kinds, family = constants.get("architectures"), str(constants.get("model_type"))
    wanted["architectures"] = ("a list of names", isinstance(kinds, list))
    for key, (kind, fits) in wanted.items():
        if constants.get(key) is not None and not fits:
            raise ConfigError(f"{key} in config.json is {kind}", got=json.dumps(constants[key])[:80], who=str(path),
                              fix="correct it, or fetch config.json again")
    if family in FITTING and kinds and "auto_map" not in constants and (
            str(kinds[0]).lower() != f"{family.replace('_', '')}forcausallm"):
        raise ConfigError(f"the architecture is not that of config.json's model_type {family}", got=kinds[0],
                          who=str(path), fix="both have to be of one checkpoint; a wrapper's name is not its model's")


def _reference(config: RunConfig, constants: Mapping[str, object]) -> None:
    """
    Raises:
        ConfigError: the reference, whose weights are also those of a warm start, is another model.
    """
    path = Path(config.checkpoint.ref_load or "") / "config.json"
    try:
        other = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # no Hugging Face folder, or one that the start will speak of
        return
    ours, theirs = ({"vocab_size": one.get("vocab_size"), "model_type": one.get("model_type")} |
                    {key: value for _, key, value in _constants(one)} for one in (constants, other))
    for key in ours:
        if ours[key] is not None and theirs.get(key, ours[key]) not in (None, ours[key]):
            raise ConfigError(f"the reference is another model: its {key} is {theirs[key]}", got=ours[key],
                              who=f"{who(config, 'checkpoint.ref_load')}, {path}",
                              fix="name a checkpoint of the model that is trained with --ref-load")


def _constants(constants: Mapping[str, Any]) -> Iterator[tuple[str, str, object]]:
    """(field, key of config.json, value) of what it states."""
    latent = isinstance(constants.get("kv_lora_rank"), int)
    for field, key in PLAIN.items():
        if constants.get(key) is not None and not (latent and field in ("num_query_groups", "kv_channels")):
            yield field, key, constants[key]
    experts = next((key for key in EXPERTS if constants.get(key)), None)
    if experts:
        yield "num_moe_experts", experts, constants[experts]
    elif constants.get("intermediate_size"):
        yield "ffn_hidden_size", "intermediate_size", constants["intermediate_size"]
    rope = constants.get("rope_parameters")
    key, holder = ("rope_parameters.rope_theta", rope) if isinstance(rope, Mapping) else ("rope_theta", constants)
    theta = holder.get("rope_theta")
    if isinstance(theta, int | float):
        yield "rotary_base", key, theta
