"""The model against what a run says of it: [model] and config.json, and how an engine's GPUs cut it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from miles_core.config.architecture import Architecture, architecture_of
from miles_core.config.load import config_json, quantised, who
from miles_core.config.tables import RunConfig
from miles_core.errors import BatchError, ConfigError

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
FLAGS = ("tie_word_embeddings", "use_sliding_window", "attention_bias", "norm_topk_prob")
FITTING = {"qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "llama", "mistral", "mixtral"}
"""Families whose model_type is how their architecture begins."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def check_model(config: RunConfig, note: Callable[[str], None]) -> RunConfig:
    """The configuration as it is.

    Raises:
        ConfigError: a constant that config.json contradicts, or weights that the engine cannot be given.
        BatchError: sizes that an engine's GPUs do not divide.
    """
    path, said = config_json(config)
    if said is None:
        return config
    _kinds(path, said)
    if not config.debug.debug_rollout_only:
        for field, key, stated in _constants(said):
            given = config.megatron.get(field)
            if given is not None and given != stated:
                raise ConfigError(f"{field} disagrees with the checkpoint, whose {key} is {stated}", got=given,
                                  who=f"{who(config, f'megatron.{field}')}, {path}",
                                  fix=f"leave {field} out, or use a checkpoint with that value")
        _reference(config, said)
    if config.rollout.engine == "sglang" and not (config.sglang.rollout_external or config.debug.debug_train_only):
        _engine(config, architecture_of(config), said)
        _quantising(config)
    return config


def _kinds(path: Path, said: Mapping[str, object]) -> None:
    """
    Raises:
        ConfigError: a value of config.json is of no kind that its key can have.
    """
    wanted = {key: ("a whole number from 1 on", type(said.get(key)) is int and said[key] >= 1) for key in WHOLE}
    wanted |= {key: ("true or false", isinstance(said.get(key), bool)) for key in FLAGS}
    wanted |= {key: ("an object, such as {\"rope_type\": ...}", isinstance(said.get(key), Mapping))
               for key in ("rope_scaling", "rope_parameters", "quantization_config")}
    epsilon, kinds, family = said.get("rms_norm_eps"), said.get("architectures"), said.get("model_type")
    wanted["rms_norm_eps"] = ("a small number such as 1e-6", type(epsilon) in (int, float) and 0 <= epsilon < 0.1)
    wanted["architectures"] = ("a list of names", isinstance(kinds, list))
    for key, (kind, fits) in wanted.items():
        if said.get(key) is not None and not fits:
            raise ConfigError(f"{key} in config.json is {kind}", got=json.dumps(said[key])[:80], who=str(path),
                              fix="correct it, or fetch config.json again")
    if family in FITTING and kinds and "auto_map" not in said and (
            str(kinds[0]).lower() != f"{family.replace('_', '')}forcausallm"):
        raise ConfigError(f"the architecture is not that of config.json's model_type {family}", got=kinds[0],
                          who=str(path), fix="both have to be of one checkpoint; a wrapper's name is not its model's")


def _reference(config: RunConfig, said: Mapping[str, object]) -> None:
    """
    Raises:
        ConfigError: the reference, whose weights are also those of a warm start, is another model.
    """
    path = Path(config.checkpoint.ref_load or "") / "config.json"
    try:
        other = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # no Hugging Face folder, or one that the start will speak of
        return
    ours, theirs = ({"vocab_size": one.get("vocab_size"), "model_type": one.get("model_type")} |
                    {key: value for _, key, value in _constants(one)} for one in (said, other))
    for key in ours:
        if ours[key] is not None and theirs.get(key, ours[key]) not in (None, ours[key]):
            raise ConfigError(f"the reference is another model: its {key} is {theirs[key]}", got=ours[key],
                              who=f"{who(config, 'checkpoint.ref_load')}, {path}",
                              fix="name a checkpoint of the model that is trained with --ref-load")


def _constants(said: Mapping[str, object]) -> Iterator[tuple[str, str, object]]:
    """(field, key of config.json, value) of what it states."""
    latent = isinstance(said.get("kv_lora_rank"), int)
    for field, key in PLAIN.items():
        if said.get(key) is not None and not (latent and field in ("num_query_groups", "kv_channels")):
            yield field, key, said[key]
    experts = next((key for key in EXPERTS if said.get(key)), None)
    if experts:
        yield "num_moe_experts", experts, said[experts]
    elif said.get("intermediate_size"):
        yield "ffn_hidden_size", "intermediate_size", said["intermediate_size"]
    rope = said.get("rope_parameters")
    nested = isinstance(rope, Mapping)
    theta = rope.get("rope_theta") if nested else said.get("rope_theta")
    if isinstance(theta, int | float):
        yield "rotary_base", "rope_parameters.rope_theta" if nested else "rope_theta", theta


def _engine(config: RunConfig, model: Architecture, said: Mapping[str, object]) -> None:
    """What SGLang asserts of tensor and expert parallelism."""
    server = config.server
    tensor = config.perf.rollout_num_gpus_per_engine // server.get("pp_size", 1)
    expert = server.get("ep_size", 1)
    attention = tensor // server.get("dp_size", 1) if server.get("enable_dp_attention") else tensor
    problems = []
    if attention and model.heads and model.heads % attention:
        problems.append(("num_attention_heads", model.heads, attention))
    if attention and model.groups and not model.rank and model.groups % attention and attention % model.groups:
        problems.append(("num_key_value_heads", model.groups, attention))
    if model.ffn and not model.experts and model.ffn % tensor:
        problems.append(("intermediate_size", model.ffn, tensor))
    if model.experts and expert > 1 and model.experts % expert:
        problems.append(("the number of experts", model.experts, expert))
    if model.experts and model.expert_ffn and tensor % expert == 0 and model.expert_ffn % (tensor // expert):
        problems.append(("moe_intermediate_size", model.expert_ffn, tensor // expert))
    keys = ("perf.rollout_num_gpus_per_engine", *(f"server.{key}" for key in ("ep_size", "dp_size") if key in server))
    path = config_json(config)[0]
    for name, size, parts in problems:
        raise BatchError(f"{name} {size} does not divide by the engine's {parts} GPUs", got=f"{size} / {parts}",
                         who=f"{who(config, *keys)}, {path}", fix=_divisors(size, config.perf.rollout_num_gpus))
    block = said.get("quantization_config")
    block = block.get("weight_block_size") if isinstance(block, Mapping) else None
    if isinstance(block, list) and block and isinstance(block[0], int) and tensor % expert == 0:
        shares = {"moe_intermediate_size": (model.expert_ffn, tensor // expert) if model.experts else (None, 1),
                  "intermediate_size": (model.ffn, tensor) if not model.experts and tensor > 1 else (None, 1)}
        for name, (size, parts) in shares.items():
            if size and size // parts % block[0]:
                raise BatchError(f"a GPU's share of {name} is no multiple of the blocks that share a scale",
                                 got=f"{size} / {parts}, blocks of {block[0]}", who=f"{who(config, *keys)}, {path}",
                                 fix="fewer GPUs per engine, or a checkpoint whose scales fit its sizes")


def _divisors(size: int, most: int | None) -> str:
    fits = [str(n) for n in (1, 2, 4, 8, 16) if size % n == 0 and n <= (most or 16)]
    return f"--rollout-num-gpus-per-engine one of {', '.join(fits)}"


def _quantising(config: RunConfig) -> None:
    """
    Raises:
        ConfigError: the engine would quantise what it loads, and be sent plain weights later.
    """
    given = config.server.get("quantization")
    if given and quantised(config) is None and not config.debug.debug_rollout_only:
        raise ConfigError("the engine would quantise plain weights by itself, and cannot be given new ones after that",
                          got=given, who=who(config, "server.quantization"),
                          fix="serve a checkpoint that is quantised (`miles convert --help` lists what writes one) as "
                          "--hf-checkpoint with the plain one as --ref-load, or leave it out")
