"""Settings under which the trainer would silently compute something other than the engine does or the run means."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from miles_core.config.load import config_json, who
from miles_core.config.tables import RunConfig
from miles_core.errors import ConfigError

NOISE = ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps")
"""Fields that draw random numbers in every pass: old policy, engine and trained policy would be three models."""
BALANCED = {"aux_loss", "seq_aux_loss", "global_aux_loss", "none"}
"""Of moe_router_load_balancing_type. By "sinkhorn" experts are others than the engine's, by the unknown as they are."""
_DRAWN = "is of weights that the checkpoint does not have, as fresh layers of plugin mtp; its own take their place"
HERE = {"init_method_std": _DRAWN, "embedding_init_method_std": _DRAWN,
        "moe_router_force_load_balancing": "draws experts at random in every pass: measure with it, do not train",
        "moe_expert_capacity_factor": "drops tokens by what shares their micro-batch; the engine drops none",
        "seq_aux_loss": "balances a micro-batch, not each sample, unless each has one of its own"}
"""What fields do here, or one of their values."""
SCALINGS = ("default", "linear", "llama3", "yarn")
"""How positions can be scaled here."""
SILU = {"llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "deepseek_v3", "glm4_moe", "minimax_m2"}
"""Families that are built with this activation, whatever config.json says."""
FULL = {"llama", "qwen3", "qwen3_moe"}
"""Families that are built without sliding windows."""


def check_trainer(config: RunConfig, note: Callable[[str], None]) -> RunConfig:
    """The configuration as it is.

    Raises:
        ConfigError: a field of Megatron-core, or a key of config.json, that changes what is computed unseen.
    """
    if config.debug.debug_rollout_only:
        return config
    for name in NOISE:
        if value := config.surface("megatron").get(name):
            raise ConfigError(f"{name} makes the old policy's log-probs another model's than what trains", got=value,
                              code="old-log-probs-differ", who=who(config, f"megatron.{name}"), fix="leave it at 0")
    if config.surface("megatron").get("average_in_collective"):
        raise ConfigError("the loss has divided gradients: averaging divides them again", got=True, fix="leave it out",
                          who=who(config, "megatron.average_in_collective"), code="gradients-averaged-twice")
    balanced = config.surface("megatron").get("moe_router_load_balancing_type", "none")
    kinds = {balanced} if isinstance(balanced, str) else {*balanced}
    if unknown := sorted(kinds - BALANCED):
        raise ConfigError("no router is balanced by this, or the model is another by it", got=", ".join(unknown),
                          who=who(config, "megatron.moe_router_load_balancing_type"),
                          fix=f"write {', '.join(sorted(BALANCED))}", code="router-balancing-unknown")
    for name in sorted(HERE.keys() & {*kinds, *(name for name, value in config.surface("megatron").items() if value)}):
        note(f"{name} {HERE[name]}")
    path, hf_config = config_json(config)
    _computed(hf_config or {}, str(path))
    return config


def _computed(hf_config: Mapping[str, object], origin: str) -> None:
    """
    Raises:
        ConfigError: config.json asks for a feature that the family does not implement.
    """
    family, rope = str(hf_config.get("model_type")), hf_config.get("rope_scaling") or hf_config.get("rope_parameters")
    rope = rope if isinstance(rope, Mapping) else {}
    scaling = rope.get("rope_type", rope.get("type", "default"))
    scaling = "default" if scaling == "mrope" else scaling  # plain, of positions with several axes
    kinds = hf_config.get("layer_types")
    act, factor = hf_config.get("hidden_act"), rope.get("factor", 1 if scaling == "default" else None)
    theta, other = hf_config.get("rope_theta"), rope.get("rope_theta")
    problems = {
        "hidden_act": (act, family in SILU and act not in (None, "silu")),
        "use_sliding_window": (True, family in FULL and hf_config.get("use_sliding_window") is True),
        "layer_types": (kinds, family in FULL and isinstance(kinds, list) and {*kinds} - {"full_attention"}),
        "rope_type": (scaling, scaling not in SCALINGS),
        "rope_theta": (theta, None not in (theta, other) and theta != other),
        "factor of the rope": (factor, type(factor) not in (int, float) or factor < 1),
    }
    for name, (value, wrong) in problems.items():
        if wrong:
            raise ConfigError(f"{name} in config.json is not what the trainer would compute", got=value, who=origin,
                              code="config-field-not-computed", fix="fetch it again, or use another checkpoint")
