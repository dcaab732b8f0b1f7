"""Architectures: what a Hugging Face config.json says in Megatron's words, and where each tensor goes.

A family is a small class with two methods, `model_spec` and `weight_map`; a plugin adds one under its `model_type`.
No torch here: a plan can be checked from config.json alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from miles_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """An architecture, as far as the checkpoint decides it.

    Args:
        constants: fields of TransformerConfig that the checkpoint fixes; an override may repeat but not change them.
        defaults: fields that the family prefers and an override may change.
        vocab_size: rows of the embedding.
        rope_theta: base of the rotary embedding.
        tied: the output layer is the embedding.
        max_positions: longest sequence that the checkpoint was made for.
        source: where this was read, for messages.
    """

    constants: Mapping[str, object]
    vocab_size: int
    rope_theta: float
    tied: bool
    max_positions: int
    source: str
    defaults: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rule:
    """How tensors of a checkpoint and parameters of the model stand for each other.

    Args:
        megatron: parameter name; `{layer}` and `{expert}` count from 0 over the whole model.
        hf: the tensors that it is made of, in order.
        join: "same" for one tensor, "rows" to stack along axis 0, "qkv" for Megatron's order per query group.
        layers: the layers that have it; None for a parameter outside the layers.
        experts: how many experts have it; 0 for a parameter without expert.
    """

    megatron: str
    hf: tuple[str, ...]
    join: str = "same"
    layers: tuple[int, ...] | None = None
    experts: int = 0


@dataclass(frozen=True, slots=True)
class WeightMap:
    """All tensors of a model, in the order in which they are streamed.

    Args:
        rules: one or more Rule.
        heads, groups, head_dim: for the "qkv" join.
        ignored: names of a checkpoint that stand for nothing, such as a tied lm_head written out again.
    """

    rules: tuple[Rule, ...]
    heads: int
    groups: int
    head_dim: int
    ignored: frozenset[str] = frozenset()


class Family(Protocol):
    """What a plugin offers for a model_type. `hf` is a transformers PretrainedConfig."""

    def model_spec(self, hf) -> ModelSpec: ...

    def weight_map(self, hf) -> WeightMap: ...


class Qwen3:
    """Dense Qwen3 (arXiv:2505.09388): GQA with a norm on q and k, SwiGLU, RMSNorm, no biases."""

    model_type = "qwen3"

    def model_spec(self, hf) -> ModelSpec:
        """
        Raises:
            ConfigError: a variant that is not modelled (biases, sliding windows, scaled rope, other activations).
        """
        source = getattr(hf, "_name_or_path", "") or "config.json"
        rope = getattr(hf, "rope_parameters", None) or {}
        refused = {
            "attention_bias": (bool(getattr(hf, "attention_bias", False)), False),
            "use_sliding_window": (bool(getattr(hf, "use_sliding_window", False)), False),
            "hidden_act": (hf.hidden_act, "silu"),
            "rope_type": (rope.get("rope_type", "default"), "default"),
        }
        for name, (got, wanted) in refused.items():
            if got != wanted:
                raise ConfigError(f"{self.model_type} with {name} other than {wanted!r} is not supported", got=got,
                                  who=source, fix="use a checkpoint without it, or write a model_spec plugin")
        constants = {
            "num_layers": hf.num_hidden_layers,
            "hidden_size": hf.hidden_size,
            "num_attention_heads": hf.num_attention_heads,
            "num_query_groups": hf.num_key_value_heads,
            "kv_channels": _head_dim(hf),
            "ffn_hidden_size": hf.intermediate_size,
            "layernorm_epsilon": hf.rms_norm_eps,
            "normalization": "RMSNorm",
            "qk_layernorm": True,
            "add_bias_linear": False,
            "add_qkv_bias": False,
            "gated_linear_unit": True,
            **self._expert_constants(hf),
        }
        return ModelSpec(
            constants=constants,
            defaults=self._defaults(),
            vocab_size=hf.vocab_size,
            rope_theta=float(rope.get("rope_theta") or hf.rope_theta),
            tied=bool(hf.tie_word_embeddings),
            max_positions=hf.max_position_embeddings,
            source=source,
        )

    def weight_map(self, hf) -> WeightMap:
        layers = tuple(range(hf.num_hidden_layers))
        rules = [
            Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),
            *_attention(layers),
            *self._mlp(hf, layers),
            Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
        ]
        if not hf.tie_word_embeddings:
            rules.append(Rule("output_layer.weight", ("lm_head.weight",)))
        return WeightMap(
            rules=tuple(rules), heads=hf.num_attention_heads, groups=hf.num_key_value_heads, head_dim=_head_dim(hf),
            ignored=frozenset({"lm_head.weight"} if hf.tie_word_embeddings else ()),
        )  # fmt: skip

    def _expert_constants(self, hf) -> dict[str, object]:
        return {}

    def _defaults(self) -> dict[str, object]:
        return {}

    def _mlp(self, hf, layers: tuple[int, ...]) -> list[Rule]:
        return _dense_mlp(layers)


class Qwen3Moe(Qwen3):
    """Qwen3 with a mixture of experts in all or some layers; softmax router in fp32, no shared expert."""

    model_type = "qwen3_moe"

    def _expert_constants(self, hf) -> dict[str, object]:
        return {
            "num_moe_experts": hf.num_experts,
            "moe_router_topk": hf.num_experts_per_tok,
            "moe_ffn_hidden_size": hf.moe_intermediate_size,
            "moe_layer_freq": [int(layer in self._sparse(hf)) for layer in range(hf.num_hidden_layers)],
            # softmax then top-k leaves the probabilities as they are; top-k then softmax normalises them
            "moe_router_pre_softmax": not hf.norm_topk_prob,
            "moe_router_score_function": "softmax",
        }

    def _defaults(self) -> dict[str, object]:
        return {
            "moe_router_dtype": "fp32",
            "moe_aux_loss_coeff": 0.0,
            "moe_grouped_gemm": False,
        }

    def _mlp(self, hf, layers: tuple[int, ...]) -> list[Rule]:
        sparse = self._sparse(hf)
        dense = tuple(layer for layer in layers if layer not in sparse)
        expert, target = "model.layers.{layer}.mlp.experts.{expert}.", "decoder.layers.{layer}.mlp.experts."
        return [
            *(_dense_mlp(dense) if dense else ()),
            Rule("decoder.layers.{layer}.mlp.router.weight", ("model.layers.{layer}.mlp.gate.weight",), layers=sparse),
            Rule(target + "local_experts.{expert}.linear_fc1.weight",
                 (expert + "gate_proj.weight", expert + "up_proj.weight"), "rows", sparse, hf.num_experts),
            Rule(target + "local_experts.{expert}.linear_fc2.weight", (expert + "down_proj.weight",), "same", sparse,
                 hf.num_experts),
        ]  # fmt: skip

    @staticmethod
    def _sparse(hf) -> tuple[int, ...]:
        """The layers with experts (transformers' Qwen3MoeDecoderLayer)."""
        return tuple(
            layer
            for layer in range(hf.num_hidden_layers)
            if layer not in (hf.mlp_only_layers or ()) and (layer + 1) % hf.decoder_sparse_step == 0
        )


FAMILIES: dict[str, Family] = {family.model_type: family for family in (Qwen3(), Qwen3Moe())}
"""The built-in families by model_type."""


def _head_dim(hf) -> int:
    return getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads


def _attention(layers: tuple[int, ...]) -> list[Rule]:
    source, target = "model.layers.{layer}.", "decoder.layers.{layer}."
    qkv = tuple(f"{source}self_attn.{x}_proj.weight" for x in "qkv")
    return [
        Rule(target + "input_layernorm.weight", (source + "input_layernorm.weight",), layers=layers),
        Rule(target + "self_attention.linear_qkv.weight", qkv, "qkv", layers),
        Rule(target + "self_attention.q_layernorm.weight", (source + "self_attn.q_norm.weight",), layers=layers),
        Rule(target + "self_attention.k_layernorm.weight", (source + "self_attn.k_norm.weight",), layers=layers),
        Rule(target + "self_attention.linear_proj.weight", (source + "self_attn.o_proj.weight",), layers=layers),
        Rule(target + "pre_mlp_layernorm.weight", (source + "post_attention_layernorm.weight",), layers=layers),
    ]


def _dense_mlp(layers: tuple[int, ...]) -> list[Rule]:
    source, target = "model.layers.{layer}.mlp.", "decoder.layers.{layer}.mlp."
    return [
        Rule(target + "linear_fc1.weight", (source + "gate_proj.weight", source + "up_proj.weight"), "rows", layers),
        Rule(target + "linear_fc2.weight", (source + "down_proj.weight",), layers=layers),
    ]
