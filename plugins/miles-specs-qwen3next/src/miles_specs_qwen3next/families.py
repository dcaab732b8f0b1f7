"""Qwen3-Next (the Qwen3-Next-80B-A3B release; gated delta networks: arXiv:2412.06464), and Qwen3.5 and 3.6 after it."""

from __future__ import annotations

import copy
from typing import Any

from miles_megatron.decoder import Decoder, by_layer_type, refuse, rotary, stored_names
from miles_megatron.mixture import Mixture, Names
from miles_megatron.specs import Attention, Packed, Rule

_OURS, _THEIRS = "decoder.layers.{layer}.", "model.layers.{layer}."
_INSIDE = ("model.", "model.language_model.")
"""The text model's names, and the same beside a vision tower."""
_COUNT = "mtp_num_hidden_layers"
"""Key of Qwen3.5's layers for multi-token prediction, which transformers does not have."""


def qwen3_next(hf: Any) -> Decoder:
    """Gated delta nets with attention in every fourth layer, norms about zero, experts beside a gated shared one.

    Raises:
        ConfigError: biases, another activation, another kind of layer, an unknown scaling of the rope.
    """
    return _decoder(hf, _gated_delta_net, gated_delta_net, _qwen3_next_mixture(hf), left=("mtp.",))


def qwen3_5(hf: Any) -> Decoder:
    """Qwen3-Next whose delta nets keep their projections apart, alone or beside a vision tower.

    Experts, where there are any, are in all layers. Tokens of text are at one position on the rope's three axes.

    Raises:
        ConfigError: as `qwen3_next`.
    """
    names, text = stored_names(hf), copy.copy(hf.get_text_config())
    refuse(text, attn_output_gate=True, norm_topk_prob=True)
    text.tie_word_embeddings = hf.tie_word_embeddings
    # What transformers' module has where they are missing, and whatever they say.
    text.rope_parameters = {"mrope_section": [11, 11, 10], **(text.rope_parameters or {}), "mrope_interleaved": True}
    inside = any(name.startswith(_INSIDE[1]) for name in names) if names else text.model_type != hf.model_type
    mixture = _mixture(text, tuple(range(text.num_hidden_layers)), True) if hasattr(text, "num_experts") else None
    return _decoder(
        text, _apart, stacked_gated_delta_net, mixture, left=("mtp.",),
        left_counts=(_COUNT,) * bool(getattr(text, _COUNT, 0)), renamed=(_INSIDE,) if inside else (),
        carried=("model.visual.",), packed=_packed(text, names) if mixture else (),
    )  # fmt: skip


def _decoder(hf: Any, rules: Any, delta_net: Any, mixture: Mixture | None, **more: Any) -> Decoder:
    """
    Args:
        rules, delta_net: of the layers without attention: what their tensors are, and what makes their mixer.
    """
    refuse(hf, attention_bias=False, hidden_act="silu")
    rope = rotary(hf, partial=True)
    kinds = {"full_attention": Attention(rope, mixer=gated_attention),
             "linear_attention": Attention(rope, mixer=delta_net)}
    linear = [kind == "linear_attention" for kind in hf.layer_types]
    layers = {kind: tuple(i for i, one in enumerate(linear) if one is kind) for kind in (True, False)}
    constants = {
        "attention_output_gate": True,
        "linear_attention_freq": list(map(int, linear)),
        "linear_conv_kernel_dim": hf.linear_conv_kernel_dim,
        "linear_key_head_dim": hf.linear_key_head_dim,
        "linear_value_head_dim": hf.linear_value_head_dim,
        "linear_num_key_heads": hf.linear_num_key_heads,
        "linear_num_value_heads": hf.linear_num_value_heads,
    }
    return Decoder(
        hf=hf, attention=by_layer_type(hf, kinds), zero_centred_norms=True, qk_norm=True,
        mixing=(*rules(hf, layers[True]), *_gated_attention(layers[False])),
        constants=constants, mixture=mixture, **more,
    )  # fmt: skip


def gated_delta_net(config: Any, attention: Attention, rope: Any, modules: Any) -> Any:
    """The mixer of the layers without attention; see specs.Attention. It has no rope."""
    from megatron.core.transformer import ModuleSpec

    from miles_specs_qwen3next.mixer import GatedDeltaNet

    return ModuleSpec(module=GatedDeltaNet, params={"column": modules.column, "row": modules.row})


def stacked_gated_delta_net(config: Any, attention: Attention, rope: Any, modules: Any) -> Any:
    """The same where the projections' rows are not sorted by key heads."""
    spec = gated_delta_net(config, attention, rope, modules)
    spec.params["stacked"] = True
    return spec


def gated_attention(config: Any, attention: Attention, rope: Any, modules: Any) -> Any:
    """The mixer of the layers with attention; see specs.Attention."""
    from megatron.core.transformer import ModuleSpec
    from megatron.core.transformer.attention import SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType

    from miles_specs_qwen3next.mixer import GatedAttention

    return ModuleSpec(
        module=GatedAttention, params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=modules.column, core_attention=modules.attention(config, attention, rope),
            linear_proj=modules.row, q_layernorm=modules.norm, k_layernorm=modules.norm,
        ),
    )  # fmt: skip


def _qwen3_next_mixture(hf: Any) -> Mixture | None:
    if not hf.num_experts:
        return None
    # transformers' Qwen3NextDecoderLayer
    sparse = tuple(layer for layer in range(hf.num_hidden_layers)
                   if layer not in hf.mlp_only_layers and (layer + 1) % hf.decoder_sparse_step == 0)
    return _mixture(hf, sparse, hf.norm_topk_prob)


def _mixture(hf: Any, sparse: tuple[int, ...], normalised: bool) -> Mixture:
    """Qwen3-MoE's, and an expert that every token passes, by a gate of its own."""
    return Mixture(
        layers=hf.num_hidden_layers, sparse=sparse, experts=hf.num_experts, chosen=hf.num_experts_per_tok,
        width=hf.moe_intermediate_size, shared=hf.shared_expert_intermediate_size, normalised=normalised,
        names=Names(shared="mlp.shared_expert.", shared_gate="mlp.shared_expert_gate.weight"),
    )  # fmt: skip


def _packed(hf: Any, names: frozenset[str]) -> tuple[Packed, ...]:
    """The released checkpoints keep the experts of a layer in two tensors; those that transformers writes do not."""
    both, down = (f"mlp.experts.{part}" for part in ("gate_up_proj", "down_proj"))
    within = tuple(start for start in ("model.", "mtp.")
                   if any(name.startswith(start) and name.endswith(both) for name in names))
    if not within:
        return ()
    each = Names()
    return (Packed(both, (each.gate, each.up), hf.num_experts, within=within),
            Packed(down, (each.down,), hf.num_experts, within=within))


def _gated_attention(layers: tuple[int, ...]) -> tuple[Rule, ...]:
    ours, theirs = _OURS + "self_attention.", _THEIRS + "self_attn."
    qkv = tuple(f"{theirs}{part}_proj.weight" for part in "qkv")
    return (
        Rule(ours + "linear_qkv.weight", qkv, "qkv_gate", layers),
        *(Rule(f"{ours}{x}_layernorm.weight", (f"{theirs}{x}_norm.weight",), layers=layers) for x in "qk"),
        Rule(ours + "linear_proj.weight", (theirs + "o_proj.weight",), layers=layers),
    ) if layers else ()  # fmt: skip


def _gated_delta_net(hf: Any, layers: tuple[int, ...]) -> tuple[Rule, ...]:
    """in_proj_* lie key head by key head already, and so are cut as they are."""
    ours, theirs = _OURS + "self_attention.", _THEIRS + "linear_attn."
    names = {"in_proj_qkvz.weight": "in_proj_qkvz.weight", "in_proj_ba.weight": "in_proj_ba.weight",
             "A_log": "A_log", "dt_bias": "dt_bias", "norm_weight": "norm.weight", "out_proj.weight": "out_proj.weight"}
    return (
        *(Rule(ours + mine, (theirs + name,), layers=layers) for mine, name in names.items()),
        Rule(ours + "conv_weight", (theirs + "conv1d.weight",), "sections", layers, sections=_sizes(hf)),
    ) if layers else ()  # fmt: skip


def _apart(hf: Any, layers: tuple[int, ...]) -> tuple[Rule, ...]:
    """in_proj_qkv has all queries, then all keys and all values; gates and the heads' two numbers are on their own."""
    ours, theirs = _OURS + "self_attention.", _THEIRS + "linear_attn."
    sizes = _sizes(hf)
    names = {"A_log": "A_log", "dt_bias": "dt_bias", "norm_weight": "norm.weight", "out_proj.weight": "out_proj.weight"}
    return (
        Rule(ours + "in_proj_qkvz.weight", tuple(f"{theirs}in_proj_{x}.weight" for x in ("qkv", "z")), "sections",
             layers, sections=(*sizes, sizes[-1]), stacks=(3, 1)),
        Rule(ours + "in_proj_ba.weight", tuple(f"{theirs}in_proj_{x}.weight" for x in "ba"), "rows", layers),
        *(Rule(ours + mine, (theirs + name,), layers=layers) for mine, name in names.items()),
        Rule(ours + "conv_weight", (theirs + "conv1d.weight",), "sections", layers, sections=sizes),
    ) if layers else ()  # fmt: skip


def _sizes(hf: Any) -> tuple[int, int, int]:
    """Channels of all queries, keys and values of a delta net."""
    key, value = (heads * size for heads, size in ((hf.linear_num_key_heads, hf.linear_key_head_dim),
                                                   (hf.linear_num_value_heads, hf.linear_value_head_dim)))
    return key, key, value
