"""gpt-oss (arXiv:2508.10925)."""

from __future__ import annotations

from typing import Any

from miles_megatron.decoder import Decoder, by_layer_type, refuse, rotary
from miles_megatron.mixture import Mixture, Names
from miles_megatron.specs import Attention, Packed, Rule

_OURS, _THEIRS = "decoder.layers.{layer}.mlp.", "model.layers.{layer}.mlp."
_EACH = Names(router="mlp.router.weight")
"""No file has the experts' own names: they are packed."""


def gpt_oss(hf: Any) -> Decoder:
    """A sink per head, windows in every other layer, biases everywhere, experts with a clamped SwiGLU.

    Raises:
        ConfigError: no biases in attention, another slope of the activation, another kind of layer, an unknown scaling
            of the rope.
    """
    refuse(hf, hidden_act="silu", attention_bias=True, swiglu_alpha=1.702)
    rope, layers = rotary(hf), tuple(range(hf.num_hidden_layers))
    kinds = {"full_attention": Attention(rope, sinks=True),
             "sliding_attention": Attention(rope, window=hf.sliding_window, sinks=True)}
    mixture = Mixture(layers=len(layers), sparse=layers, experts=hf.num_local_experts, chosen=hf.num_experts_per_tok,
                      width=hf.intermediate_size, names=_EACH)
    return Decoder(
        hf=hf, attention=by_layer_type(hf, kinds), linear_bias=True, mixture=mixture, activation="clamped_swiglu",
        mlp=(*mixture.rules(), *_biases(layers, hf.num_local_experts)), packed=_packed(hf.num_local_experts),
        constants={"activation_func_clamp_value": hf.swiglu_limit, "glu_linear_offset": 1.0},
        also={"softmax_type": ("learnable",), "window_size": ([hf.sliding_window, 0],), "window_attn_skip_freq": (2,)},
    )  # fmt: skip


def _biases(layers: tuple[int, ...], experts: int) -> tuple[Rule, ...]:
    """Of the router and of every expert."""
    ours, theirs = _OURS + "experts.local_experts.{expert}.", _THEIRS + "experts.{expert}."
    both = tuple(f"{theirs}{part}_proj.bias" for part in ("gate", "up"))
    return (Rule(_OURS + "router.bias", (_THEIRS + "router.bias",), layers=layers),
            Rule(ours + "linear_fc1.bias", both, "rows", layers, experts),
            Rule(ours + "linear_fc2.bias", (theirs + "down_proj.bias",), layers=layers, experts=experts))


def _packed(experts: int) -> tuple[Packed, ...]:
    """All experts of a layer in one tensor, gate and up row by row; the matrices as [inputs, outputs]."""
    each = "mlp.experts.{expert}."
    return (
        Packed("mlp.experts.gate_up_proj", (_EACH.gate, _EACH.up), experts, transposed=True, alternating=True,
               mxfp4=True),
        Packed("mlp.experts.down_proj", (_EACH.down,), experts, transposed=True, mxfp4=True),
        Packed("mlp.experts.gate_up_proj_bias", (each + "gate_proj.bias", each + "up_proj.bias"), experts,
               alternating=True),
        Packed("mlp.experts.down_proj_bias", (each + "down_proj.bias",), experts),
    )  # fmt: skip
