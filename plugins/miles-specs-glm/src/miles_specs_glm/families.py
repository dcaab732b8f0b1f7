"""GLM-4 (arXiv:2406.12793), the 0414 release."""

from __future__ import annotations

from typing import Any

from miles_megatron.decoder import Decoder, LayerNorms, every_layer, refuse, rotary
from miles_megatron.specs import Attention

_NORMS = LayerNorms(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")


def glm4(hf: Any) -> Decoder:
    """Interleaved rope on half of each head, biases on q, k and v, norms after attention and MLP, one gate-up tensor.

    Raises:
        ConfigError: another activation, an unknown scaling of the rope.
    """
    refuse(hf, hidden_act="silu")
    rope = rotary(hf, partial=True, interleaved=True)
    return Decoder(
        hf=hf, attention=every_layer(hf, Attention(rope)), norms=_NORMS, qkv_bias=bool(hf.attention_bias),
        fused_gate_up=True,
    )  # fmt: skip
