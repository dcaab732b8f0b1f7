"""Architecture: the constants of a checkpoint's config.json that a plan needs. Read with json, so no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from miles_core.config.load import config_json, who
from miles_core.config.tables import RunConfig

# Field -> its names in config.json, the first that is there counts, and megatron-core's, which [model] may repeat.
NAMES: dict[str, tuple[tuple[str, ...], str]] = {
    "layers": (("num_hidden_layers",), "num_layers"),
    "hidden": (("hidden_size",), "hidden_size"),
    "heads": (("num_attention_heads",), "num_attention_heads"),
    "groups": (("num_key_value_heads", "num_attention_heads"), "num_query_groups"),
    "head_dim": (("head_dim",), "kv_channels"),
    "vocab": (("vocab_size",), "vocab_size"),
    "ffn": (("intermediate_size",), "ffn_hidden_size"),
    "experts": (("num_experts", "num_local_experts", "n_routed_experts"), "num_moe_experts"),
    "expert_ffn": (("moe_intermediate_size",), "moe_ffn_hidden_size"),
    "experts_per_token": (("num_experts_per_tok",), "moe_router_topk"),
    "shared_ffn": (("shared_expert_intermediate_size",), "moe_shared_expert_intermediate_size"),
}


@dataclass(frozen=True)
class Architecture:
    """Sizes of a model; None is not known, and no experts are no mixture.

    Args:
        groups: key-value heads.
        ffn, expert_ffn, shared_ffn: inner widths of a dense layer, an expert, and the experts that all tokens share.
        sparse: how many of the layers are mixtures of experts.
        checkpoint: whether they are of a config.json, so that what it lacks is not there.
        source: field -> who says so, for messages.
    """

    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    groups: int | None = None
    head_dim: int | None = None
    vocab: int | None = None
    ffn: int | None = None
    experts: int | None = None
    expert_ffn: int | None = None
    experts_per_token: int | None = None
    shared_ffn: int | None = None
    sparse: int = 0
    checkpoint: bool = False
    source: Mapping[str, str] = field(default_factory=dict)

    @property
    def uncounted(self) -> list[str]:
        """Constants that `attention` and `active_parameters` want and that are not known, by their names."""
        needed = ["layers", "hidden", "heads", "groups", "head_dim", "vocab"]
        needed += ["ffn"] * (self.sparse != self.layers) + ["expert_ffn", "experts_per_token"] * (self.sparse > 0)
        return [NAMES[name][0][0] for name in needed if getattr(self, name) is None]

    @property
    def attention(self) -> int:
        """layers x heads x size of a head, as `packing.flops` wants it; nothing may be `uncounted`."""
        return self.layers * self.heads * self.head_dim

    @property
    def active_parameters(self) -> int:
        """Parameters of all matrices that one token meets: attention, gated MLPs, routers, its experts, the output."""
        attention = self.layers * self.head_dim * (2 * self.heads + 2 * self.groups)
        dense = (self.layers - self.sparse) * 3 * (self.ffn or 0)
        widths = (self.expert_ffn or 0) * (self.experts_per_token or 0) + (self.shared_ffn or 0)
        sparse = self.sparse * (3 * widths + (self.experts or 0))
        return self.hidden * (attention + dense + sparse + self.vocab)


def architecture_of(config: RunConfig) -> Architecture:
    """The constants of --hf-checkpoint; without a checkpoint there, what [model] says."""
    path, said = config_json(config)
    found: dict[str, int] = {}
    source: dict[str, str] = {}
    for name, (theirs, ours) in NAMES.items():
        values = [config.megatron.get(ours)] if said is None else [said.get(key) for key in theirs]
        value = next((value for value in values if isinstance(value, int) and value > 0), None)
        if value is not None:
            found[name] = value
            source[name] = who(config, f"megatron.{ours}") if said is None else str(path)
    if "head_dim" not in found and {"hidden", "heads"} <= set(found):
        found["head_dim"] = found["hidden"] // found["heads"]
    if said is not None and "expert_ffn" in found and "shared_ffn" not in found and said.get("n_shared_experts"):
        found["shared_ffn"], source["shared_ffn"] = said["n_shared_experts"] * found["expert_ffn"], str(path)
    sparse = _sparse(said or {}, found.get("layers", 0)) if "experts" in found else 0
    return Architecture(**found, sparse=sparse, checkpoint=said is not None, source=source)


def _sparse(said: Mapping[str, object], layers: int) -> int:
    """Layers with experts, by the keys of Qwen3-MoE (mlp_only_layers, decoder_sparse_step) and DeepSeek-V3."""
    dense, step = said.get("mlp_only_layers") or (), said.get("decoder_sparse_step") or 1
    first = said.get("first_k_dense_replace") or 0
    return sum(layer not in dense and (layer + 1) % step == 0 and layer >= first for layer in range(layers))
