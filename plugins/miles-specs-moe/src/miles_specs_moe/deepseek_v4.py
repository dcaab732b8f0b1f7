"""DeepSeek-V4, as transformers computes it: the layers are in compressed.py. No torch here."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from miles_megatron.decoder import Decoder, LayerNorms, refuse, stored_names
from miles_megatron.mixture import Mixture, Names
from miles_megatron.specs import Attention, Rule

_OURS, _THEIRS = "decoder.layers.{layer}.", "model.layers.{layer}."


@dataclass(frozen=True, slots=True)
class Compressed:
    """As `Attention.mixer` it makes compressed.CompressedAttention.

    Args:
        by_table: a table of token ids chooses the layer's experts.
        hf: the checkpoint's config.
    """

    by_table: bool
    hf: Any = field(compare=False, repr=False)

    def __call__(self, *_: Any) -> Any:
        """See specs.Attention.mixer."""
        from megatron.core.transformer import ModuleSpec

        from miles_specs_moe.compressed import CompressedAttention

        return ModuleSpec(module=CompressedAttention, params={"hf": self.hf})


def deepseek_v4(hf: Any) -> Decoder:
    """Streams in the residual, attention to a window and to compressed keys, experts in every layer.

    Raises:
        ConfigError: another activation or scores, biases, weights that do not add up to 1.
    """
    refuse(hf, hidden_act="silu", scoring_func="sqrtsoftplus", norm_topk_prob=True, attention_bias=False,
           mlp_bias=False, num_key_value_heads=1, attention_dropout=0.0, tie_word_embeddings=False,
           n_shared_experts=1)
    layers = tuple(range(hf.num_hidden_layers))
    released = any(name.startswith("layers.") for name in stored_names(hf))
    tables = tuple(layer for layer in layers if hf.mlp_layer_types[layer] == "hash_moe")
    mixture = Mixture(
        layers=len(layers), sparse=layers, experts=hf.n_routed_experts, chosen=hf.num_experts_per_tok,
        width=hf.moe_intermediate_size, shared=hf.moe_intermediate_size, score="sigmoid",
        bias=True, scale=hf.routed_scaling_factor, names=_NAMES,
    )  # fmt: skip
    return Decoder(
        hf=hf, attention=tuple(Attention(None, mixer=Compressed(layer in tables, hf)) for layer in layers),
        norms=LayerNorms("attn_norm", "ffn_norm"), activation="clamped_silu", mixture=mixture,
        mlp=tuple(_experts(mixture, tables)), mixing=tuple(_mixing(hf, layers, released)),
        reshape=functools.partial(_reshape, hf=hf), beside_embedding=functools.partial(_copies, hf.hc_mult),
        constants={"activation_func_clamp_value": hf.swiglu_limit, "num_query_groups": hf.num_attention_heads,
                   "hetereogenous_dist_checkpoint": True, **_UNTOLD},
        renamed=_RELEASED if released else _RELEASED[:1], left=("mtp.", "model.mtp."),
        left_counts=("num_nextn_predict_layers",),
    )  # fmt: skip


_RELEASED = (("lm_head.", "head."), ("model.embed_tokens.", "embed."), ("model.hc_head.hc_", "hc_head_"),
             ("model.", ""))
"""Names of the rules, which are those that transformers writes but for the first, -> of the release."""

_UNTOLD = {"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None, "moe_expert_capacity_factor": None,
           "moe_router_load_balancing_type": "none", "moe_router_force_load_balancing": False}
"""What the routers here do not compute; and nothing else balances them than their biases."""

_NAMES = Names(
    router="ffn.gate.weight", bias="ffn.gate.bias", gate="ffn.experts.{expert}.w1.weight",
    up="ffn.experts.{expert}.w3.weight", down="ffn.experts.{expert}.w2.weight", shared="ffn.shared_experts.",
    shared_parts=("w1", "w3", "w2"),
)  # fmt: skip

_ATTENTION = {
    "q_a_proj.weight": "wq_a.weight", "q_a_norm.weight": "q_norm.weight", "q_b_proj.weight": "wq_b.weight",
    "kv_proj.weight": "wkv.weight", "o_a_proj.weight": "wo_a.weight",
    "o_b_proj.weight": "wo_b.weight", "sinks": "attn_sink",
}  # fmt: skip
_COMPRESSOR = {"kv_proj.weight": "wkv.weight", "gate_proj.weight": "wgate.weight", "kv_norm.weight": "norm.weight",
               "position_bias": "ape"}
_INDEXER = {"q_b_proj.weight": "wq_b.weight", "scorer.weights_proj.weight": "weights_proj.weight"}
"""Of transformers' modules -> as transformers writes them."""


def _mixing(hf: Any, layers: tuple[int, ...], released: bool) -> Iterator[Rule]:
    """Of attention, and of what joins streams."""
    norm = {"kv_norm.weight": "kv_norm.weight" if released else "norm.weight"}
    sparse = tuple(n for n, kind in enumerate(hf.layer_types) if kind == "compressed_sparse_attention")
    compressed = tuple(n for n, kind in enumerate(hf.layer_types) if kind != "sliding_attention")
    parts = [("", "", _ATTENTION | norm, layers), ("compressor.", "compressor.", _COMPRESSOR, compressed),
             ("compressor.indexer.", "indexer.compressor.", _COMPRESSOR, sparse),
             ("compressor.indexer.", "indexer.", _INDEXER, sparse)]
    for inside, beginning, names, which in parts:
        for ours, theirs in names.items():
            yield Rule(f"{_OURS}self_attention.{inside}{ours}", (f"{_THEIRS}attn.{beginning}{theirs}",), layers=which)
    for part in ("fn", "base", "scale"):
        for ours, theirs in (("attention", "attn"), ("mlp", "ffn")):
            yield Rule(f"{_OURS}{ours}_streams.{part}", (f"{_THEIRS}hc_{theirs}_{part}",), layers=layers)
        yield Rule(f"{_OURS}streams_head.hc_{part}", (f"model.hc_head.hc_{part}",), layers=layers[-1:])


def _experts(mixture: Mixture, tables: tuple[int, ...]) -> Iterator[Rule]:
    """Routers have a bias, or a table."""
    for rule in mixture.rules():
        if not rule.megatron.endswith("router.expert_bias"):
            yield rule
    scored = tuple(layer for layer in mixture.sparse if layer not in tables)
    for ours, theirs, which in (("expert_bias", mixture.names.bias, scored), ("table", "ffn.gate.tid2eid", tables)):
        yield Rule(f"{_OURS}mlp.router.{ours}", (_THEIRS + theirs,), layers=which)


def _reshape(*layer: Any, hf: Any) -> None:
    from miles_specs_moe.compressed import reshape

    reshape(*layer, hf=hf)


def _copies(streams: int, *_: Any) -> Any:
    from miles_megatron.streams import Copies

    return Copies(streams)
