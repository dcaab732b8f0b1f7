"""Llama (arXiv:2307.09288, arXiv:2407.21783) and the dense decoders that differ from it by a few parts.

SmolLM3, Granite 3, Phi-3 and 4 (arXiv:2404.14219, arXiv:2412.08905), OLMo 2
(arXiv:2501.00656) and 3.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from miles_megatron.decoder import Decoder, LayerNorms, by_layer_type, every_layer, refuse, rotary
from miles_megatron.specs import Attention

_NORMS_AFTER = LayerNorms(before_attention=None, before_mlp=None, after_attention="post_attention_layernorm",
                          after_mlp="post_feedforward_layernorm")  # fmt: skip


def llama(hf: Any) -> Decoder:
    """The plainest decoder: GQA, SwiGLU, RMSNorm; biases on every projection or on none.

    Raises:
        ConfigError: biases in attention or MLP alone, another activation, an unknown scaling of the rope.
    """
    bias = bool(hf.mlp_bias)
    refuse(hf, hidden_act="silu", attention_bias=bias)
    return Decoder(hf=hf, attention=every_layer(hf, Attention(rotary(hf))), linear_bias=bias)


def smollm3(hf: Any) -> Decoder:
    """Llama some of whose layers have no rope; these may have a window.

    Raises:
        ConfigError: biases, another activation, an unknown scaling of the rope.
    """
    refuse(hf, attention_bias=False, mlp_bias=False)
    decoder, positions, rope = llama(hf), hf.no_rope_layers[: hf.num_hidden_layers], rotary(hf)
    windows = [hf.sliding_window if hf.use_sliding_window and kind == "sliding_attention" else None
               for kind in hf.layer_types]
    attention = tuple(Attention(rope if turned else None, window=window)
                      for turned, window in zip(positions, windows, strict=True))
    return replace(decoder, attention=attention, also={"no_rope_freq": (
        hf.no_rope_layer_interval, [int(not turned) for turned in positions])})


def granite(hf: Any) -> Decoder:
    """Llama with factors on the embedding, on what joins the residual, on scores and on logits.

    Raises:
        ConfigError: as `llama`.
    """
    return replace(llama(hf), embedding_scale=hf.embedding_multiplier, residual_scale=hf.residual_multiplier,
                   softmax_scale=hf.attention_multiplier, logit_scale=1 / hf.logits_scaling)


def phi3(hf: Any) -> Decoder:
    """Phi-3 and Phi-4: q, k and v in one tensor, gate and up in another, rope on all or a part of each head.

    Raises:
        ConfigError: another activation, or frequencies that depend on the length of a sequence (longrope).
    """
    refuse(hf, hidden_act="silu")
    attention = Attention(rotary(hf, partial=True), window=hf.sliding_window)
    return Decoder(hf=hf, attention=every_layer(hf, attention), fused_qkv=True, fused_gate_up=True)


def olmo2(hf: Any) -> Decoder:
    """Norms behind attention and MLP rather than before them, and one over all heads of q and one over those of k.

    Raises:
        ConfigError: biases, another activation, an unknown scaling of the rope.
    """
    return _olmo(hf, every_layer(hf, Attention(rotary(hf))))


def olmo3(hf: Any) -> Decoder:
    """OLMo 2 with a window in most layers, whose rope is not the one of the others.

    Raises:
        ConfigError: as `olmo2`.
    """
    windows = {"full_attention": None, "sliding_attention": hf.sliding_window}
    ropes = hf.rope_parameters
    if "full_attention" not in ropes:  # config.json as released, to transformers before 5.13: one with the scaling
        ropes = {"full_attention": ropes, "sliding_attention": {"rope_theta": ropes["rope_theta"]}}
    kinds = {kind: Attention(rotary(hf, ropes[kind]), window) for kind, window in windows.items()}
    return _olmo(hf, by_layer_type(hf, kinds))


def _olmo(hf: Any, attention: tuple[Attention, ...]) -> Decoder:
    refuse(hf, hidden_act="silu", attention_bias=False)
    return Decoder(hf=hf, attention=attention, norms=_NORMS_AFTER, wide_qk_norm=True)
