"""Architecture: the constants of a checkpoint's config.json that a plan needs. Read with json, so no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from miles_core.config.load import shape_json, who
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
    "latent": (("moe_latent_size",), "moe_latent_size"),
    "query_rank": (("q_lora_rank",), "q_lora_rank"),
    "rank": (("kv_lora_rank",), "kv_lora_rank"),
    "plain": (("qk_nope_head_dim",), "qk_head_dim"),
    "turned": (("qk_rope_head_dim",), "qk_pos_emb_head_dim"),
    "value": (("v_head_dim",), "v_head_dim"),
    "gated": (("attn_output_gate",), "attention_output_gate"),
    "linear_groups": (("linear_num_key_heads",), "linear_num_key_heads"),
    "linear_heads": (("linear_num_value_heads",), "linear_num_value_heads"),
    "linear_key": (("linear_key_head_dim",), "linear_key_head_dim"),
    "linear_value": (("linear_value_head_dim",), "linear_value_head_dim"),
}


@dataclass(frozen=True)
class Architecture:
    """Sizes of a model; None is not known, and no experts are no mixture.

    Args:
        groups: key-value heads.
        ffn, expert_ffn, shared_ffn: inner widths of a dense layer, an expert, and the experts that all tokens share;
            latent: width of the projection of a token that the others see, where they do not see the token.
        query_rank, rank, plain, turned, value: of latent attention, which a model has if it has a rank: widths of the
            latents of queries and of keys, channels of a key without and with its position, and of a value.
        gated: queries come with a gate of attention's output.
        linear_groups, linear_heads, linear_key, linear_value: of layers of linear attention: heads of keys and of
            values, and the channels of one.
        linear, sparse: how many of the layers are such, and how many are mixtures of experts.
        near, window: how many of the layers have attention that sees the last tokens alone, and how many tokens.
        chunked, chunk: likewise of attention that sees the tokens of its own chunk of the sequence.
        alone: how many of the layers are an MLP or a mixture without attention; if any, the others are attention alone.
        matrices: of an MLP: 3, or 2 without a gate.
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
    latent: int | None = None
    query_rank: int | None = None
    rank: int | None = None
    plain: int | None = None
    turned: int | None = None
    value: int | None = None
    gated: int | None = None
    linear_groups: int | None = None
    linear_heads: int | None = None
    linear_key: int | None = None
    linear_value: int | None = None
    linear: int = 0
    sparse: int = 0
    near: int = 0
    window: int | None = None
    chunked: int = 0
    chunk: int | None = None
    alone: int = 0
    matrices: int = 3
    checkpoint: bool = False
    source: Mapping[str, str] = field(default_factory=dict)

    @property
    def uncounted(self) -> list[str]:
        """Constants that a count of parameters and operations wants and that are not known, by their names."""
        needed = ["layers", "hidden", "heads", "groups", "head_dim", "vocab"]
        needed += ["ffn"] * (self.sparse != self.mlps) + ["expert_ffn", "experts_per_token"] * (self.sparse > 0)
        needed += ["linear_groups", "linear_heads", "linear_key", "linear_value"] * (self.linear > 0)
        return [NAMES[name][0][0] for name in needed if getattr(self, name) is None]

    @property
    def attention(self) -> int:
        """Layers x heads x size of a head, of attention that is not linear; nothing may be `uncounted`."""
        return self.full * self.heads * (self.head_dim + self.value_dim) // 2

    def attention_of(self, length: int) -> int:
        """`attention` for a sequence of so many tokens: of all pairs of a token and one before it, a window leaves out
        a share of (1 - window / length)^2, and chunks those of different chunks."""
        beyond = max(0.0, 1 - (self.window or length) / length) ** 2
        chunks, last = divmod(length, self.chunk or length)
        apart = 1 - (chunks * (self.chunk or length) ** 2 + last**2) / length**2
        unseen = beyond * self.near + apart * self.chunked
        return self.attention - round(unseen * self.heads * (self.head_dim + self.value_dim) / 2)

    @property
    def full(self) -> int:
        """Layers with attention that is not linear."""
        return self.layers - self.linear - self.alone

    @property
    def mlps(self) -> int | None:
        """Layers with an MLP or a mixture of experts."""
        return self.alone or self.layers

    @property
    def linear_widths(self) -> tuple[int, int]:
        """Channels of all keys and of all values of a layer of linear attention; 0 without such layers."""
        return ((self.linear_groups or 0) * (self.linear_key or 0), (self.linear_heads or 0) * (self.linear_value or 0))

    @property
    def value_dim(self) -> int:
        """Channels of a value's head."""
        return self.value if self.rank and self.value else self.head_dim


def architecture_of(config: RunConfig) -> Architecture:
    """The constants of --hf-checkpoint; without a checkpoint there, what [model] says."""
    path, constants = shape_json(config)
    known, sizes, source = constants or {}, dict[str, int](), dict[str, str]()
    for name, (theirs, ours) in NAMES.items():
        values = [config.surface("megatron").get(ours)] if constants is None else [constants.get(key) for key in theirs]
        if value := next((value for value in values if isinstance(value, int) and value > 0), None):
            sizes[name], source[name] = value, who(config, f"megatron.{ours}") if constants is None else str(path)
    if kinds := _kinds(known):
        sizes.setdefault("layers", len(kinds))
    if "head_dim" not in sizes and {"hidden", "heads"} <= set(sizes):
        sizes["head_dim"] = sizes["hidden"] // sizes["heads"]
    if "rank" in sizes and {"plain", "turned", "heads"} <= set(sizes):  # config.json's head_dim may be the turned part
        sizes |= {"head_dim": sizes["plain"] + sizes["turned"], "groups": sizes["heads"]}
    if "experts" in sizes and "expert_ffn" not in sizes and "ffn" in sizes:  # no dense layers, so no name for it
        sizes["expert_ffn"] = sizes["ffn"]
    if (shared := known.get("n_shared_experts")) and "expert_ffn" in sizes and "shared_ffn" not in sizes:
        sizes["shared_ffn"], source["shared_ffn"] = shared * sizes["expert_ffn"], str(path)
    sparse = sparse_layers(known, sizes.get("layers", 0)) if "experts" in sizes else 0
    if kinds and not sparse:  # files of a class that can have experts state their sizes without any
        sizes.pop("experts", None)
    layers, window = sizes.get("layers", 0), known.get("sliding_window")
    linear = _of_kind(known, layers, "linear_attention",
                      "full_attention_interval" if "linear_num_key_heads" in known else "")
    near = _of_kind(known, layers, "sliding_attention", "sliding_window_pattern") if isinstance(window, int) else 0
    chunk, chunked = known.get("attention_chunk_size"), _chunked(known, layers)
    alone, matrices = kinds.count("mlp") + kinds.count("moe"), 2 if known.get("mlp_hidden_act") == "relu2" else 3
    return Architecture(**sizes, linear=linear, sparse=sparse, near=near, window=window if near else None,
                        chunked=chunked, chunk=chunk if chunked else None, alone=alone, matrices=matrices,
                        checkpoint=constants is not None, source=source)


def _kinds(constants: Mapping[str, object]) -> list[str]:
    """What config.json calls its layers, in words or in letters."""
    kinds = constants.get("layer_types")
    return [_WORDS.get(kind, kind) for kind in kinds] if isinstance(kinds, list | str) else []


_WORDS = {"M": "linear_attention", "mamba": "linear_attention", "E": "moe", "-": "mlp"}  # and letters


def _of_kind(constants: Mapping[str, object], layers: int, kind: str, interval: str) -> int:
    """Layers that are called so; where none has a name, all but every n-th, which the other key says."""
    if kinds := _kinds(constants):
        return kinds[:layers].count(kind)
    every = constants.get(interval)
    return layers - layers // every if isinstance(every, int) and every > 0 else 0


def _chunked(constants: Mapping[str, object], layers: int) -> int:
    """Layers whose attention is chunked: by name, else those with a rope, which are all but every fourth by default."""
    if not isinstance(constants.get("attention_chunk_size"), int):
        return 0
    turned = constants.get("no_rope_layers")  # 1 for a layer that has one
    if isinstance(turned, list) and turned and not _kinds(constants):
        return sum(turned[:layers])
    return _of_kind({"no_rope_layer_interval": 4, **constants}, layers, "chunked_attention", "no_rope_layer_interval")


def sparse_layers(constants: Mapping[str, object], layers: int) -> int:
    """How many of the first layers have experts, by the keys that transformers' families have for it."""
    if {"mlp", "moe"} & set(kinds := _kinds(constants)):
        return kinds[:layers].count("moe")
    if isinstance(constants.get("mlp_layer_types"), list):
        return sum(kind != "dense" for kind in constants["mlp_layer_types"][:layers])
    dense, step, first = map(constants.get, ("mlp_only_layers", "decoder_sparse_step", "first_k_dense_replace"))
    return sum(n >= (first or 0) and n not in (dense or ()) and (n + 1) % (step or 1) == 0 for n in range(layers))
