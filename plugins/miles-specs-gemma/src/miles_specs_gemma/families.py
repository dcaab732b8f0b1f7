"""Gemma 2 (arXiv:2408.00118) and the text models of Gemma 3 (arXiv:2503.19786), alone or beside a vision tower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from miles_megatron.decoder import Decoder, LayerNorms, beside_tower, by_layer_type, refuse, rotary
from miles_megatron.specs import Attention, Rotary

_NORMS = LayerNorms(before_mlp="pre_feedforward_layernorm", after_attention="post_attention_layernorm",
                    after_mlp="post_feedforward_layernorm")  # fmt: skip


def gemma2(hf: Any) -> Decoder:
    """Sandwich norms about zero, a scaled embedding, softcaps, and sliding windows in every other layer.

    Raises:
        ConfigError: biases, bidirectional attention, another activation, an unknown scaling of the rope.
    """
    rope = rotary(hf)
    return _gemma(hf, {"sliding_attention": rope, "full_attention": rope})


def gemma3_text(hf: Any) -> Decoder:
    """Gemma 2 with norms on q and k, and a rope of its own for the layers with a window.

    Raises:
        ConfigError: as `gemma2`, and a softcap on scores, which transformers' Gemma 3 does not compute.
    """
    refuse(hf, attn_logit_softcapping=None)
    ropes = {kind: rotary(hf, hf.rope_parameters[kind]) for kind in ("sliding_attention", "full_attention")}
    return replace(_gemma(hf, ropes), qk_norm=True)


def gemma3(hf: Any) -> Decoder:
    """The text model of a Gemma 3 that sees; its vision tower and what lies between are left as they are.

    Without images its attention is causal, as in training on text.

    Raises:
        ConfigError: as `gemma3_text`.
    """
    return beside_tower(hf, gemma3_text)


def _gemma(hf: Any, ropes: Mapping[str, Rotary]) -> Decoder:
    refuse(hf, hidden_activation="gelu_pytorch_tanh", attention_bias=False, use_bidirectional_attention=False)
    softcap = hf.attn_logit_softcapping
    kinds = {kind: Attention(rope, hf.sliding_window if kind == "sliding_attention" else None, softcap)
             for kind, rope in ropes.items()}
    return Decoder(
        hf=hf, attention=by_layer_type(hf, kinds), norms=_NORMS, zero_centred_norms=True,
        activation="gelu_pytorch_tanh", softmax_scale=hf.query_pre_attn_scalar**-0.5,
        embedding_scale=hf.hidden_size**0.5, logit_softcap=hf.final_logit_softcapping,
    )  # fmt: skip
