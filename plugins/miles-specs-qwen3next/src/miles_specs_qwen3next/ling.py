"""Ling 3.0: delta nets whose channels decay by themselves, latent attention in every few layers, experts. No torch."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

from miles_megatron.decoder import Decoder, by_layer_type, refuse
from miles_megatron.latent import Latent
from miles_megatron.mixture import Mixture, Names
from miles_megatron.specs import Attention, Rule

_OURS, _THEIRS = "decoder.layers.{layer}.self_attention.", "model.layers.{layer}.self_attn."


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """As `Attention.mixer` it makes mixer.ChannelDeltaNet, which has no rope; see there for `floor`."""

    floor: float | None

    def __call__(self, config: Any, attention: Attention, rope: Any, modules: Any) -> Any:
        """See specs.Attention.mixer."""
        from megatron.core.transformer import ModuleSpec

        from miles_specs_qwen3next.mixer import ChannelDeltaNet

        return ModuleSpec(module=ChannelDeltaNet,
                          params={"column": modules.column, "row": modules.row, "floor": self.floor})


def bailing_hybrid(hf: Any) -> Decoder:
    """Latent attention with a gate for each head in every few layers, delta nets in the others.

    Raises:
        ConfigError: biases, a latent of queries, another activation or limits of it, another kind of layer, an unknown
            scaling of the rope, or a router that Megatron's would compute otherwise.
    """
    refuse(hf, attention_bias=False, hidden_act="silu", num_key_value_heads=hf.num_attention_heads,
           q_lora_rank=None, use_mla_nope=False)
    for limits in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"):
        if any(getattr(hf, limits, None) or ()):  # of a layer; transformers reads none
            refuse(hf, **{limits: None})
    hf = _whole_rope(hf)
    latent = Latent(query_rank=None, rank=hf.kv_lora_rank, plain=hf.qk_nope_head_dim, turned=hf.qk_rope_head_dim,
                    value=hf.v_head_dim, gated=True)
    decoder = latent.decoder(hf, interleaved=True, mixture=_mixture(hf))
    net = DeltaNet(hf.kda_lower_bound if hf.kda_safe_gate else None)
    kinds = {"full_attention": decoder.attention[0], "linear_attention": Attention(None, mixer=net)}
    linear = [kind == "linear_attention" for kind in hf.layer_types]
    mixing = (*latent.rules(tuple(n for n, one in enumerate(linear) if not one)),
              *_delta_net(hf, tuple(n for n, one in enumerate(linear) if one)))
    heads, size, layers = hf.linear_num_heads, hf.linear_head_dim, hf.num_hidden_layers
    constants = {
        "linear_attention_freq": list(map(int, linear)), "linear_conv_kernel_dim": hf.linear_conv_kernel_dim,
        "linear_key_head_dim": size, "linear_value_head_dim": size, "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
    }  # fmt: skip
    drafting = range(layers, layers + (hf.num_mtp_layers or 0))
    return replace(
        decoder, attention=by_layer_type(hf, kinds), mixing=tuple(map(_in_the_files, mixing)),
        constants={**decoder.constants, **constants}, renamed=(("model.embed_tokens.", "model.word_embeddings."),),
        left=tuple(f"model.layers.{n}." for n in drafting), left_counts=("num_nextn_predict_layers",) * bool(drafting),
    )  # fmt: skip


def _whole_rope(hf: Any) -> Any:
    """As transformers computes it: all of `qk_rope_head_dim` turns, though the releases write a part of one half."""
    if hf.rope_parameters["rope_type"] != "default":
        return hf
    hf = copy.copy(hf)
    hf.rope_parameters = {key: value for key, value in hf.rope_parameters.items() if key != "partial_rotary_factor"}
    return hf


def _mixture(hf: Any) -> Mixture:
    return Mixture(
        layers=hf.num_hidden_layers,
        sparse=tuple(n for n, kind in enumerate(hf.mlp_layer_types) if kind == "sparse"),
        experts=hf.num_local_experts, chosen=hf.num_experts_per_tok, width=hf.moe_intermediate_size,
        shared=hf.moe_intermediate_size * hf.n_shared_experts, score="sigmoid", normalised=bool(hf.norm_topk_prob),
        bias=True, groups=hf.n_group, of_groups=hf.topk_group, scale=hf.routed_scaling_factor,
        names=Names(bias="mlp.gate.expert_bias"),
    )  # fmt: skip


def _delta_net(hf: Any, layers: tuple[int, ...]) -> tuple[Rule, ...]:
    """Every projection, and every convolution, is a tensor of its own."""
    names = {"A_log": "A_log", "dt_bias": "dt_bias", "norm_weight": "o_norm.weight", "out_proj.weight": "o_proj.weight"}

    def each(kind: str, parts: str) -> tuple[str, ...]:
        return tuple(f"{_THEIRS}{part}_{kind}.weight" for part in parts)

    return (
        Rule(_OURS + "in_proj_qkvz.weight", each("proj", "qkvg"), "rows", layers),
        Rule(_OURS + "in_proj_ba.weight", each("proj", "bf"), "sections", layers, sections=(1, hf.linear_head_dim),
             stacks=(1, 1)),
        Rule(_OURS + "conv_weight", each("conv1d", "qkv"), "rows", layers),
        *(Rule(_OURS + mine, (_THEIRS + name,), layers=layers) for mine, name in names.items()),
    ) if layers else ()  # fmt: skip


def _in_the_files(rule: Rule) -> Rule:
    return replace(rule, hf=tuple(name.replace(".self_attn.", ".attention.").replace(".o_proj.", ".dense.")
                                  for name in rule.hf))
