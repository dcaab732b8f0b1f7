"""Qwen2 (arXiv:2407.10671) and Qwen2.5 (arXiv:2412.15115)."""

from __future__ import annotations

from typing import Any

from miles_megatron.decoder import Decoder, by_layer_type, refuse, rotary
from miles_megatron.specs import Attention


def qwen2(hf: Any) -> Decoder:
    """Llama with biases on q, k and v; the layers after `max_window_layers` may have a sliding window.

    Raises:
        ConfigError: another activation, an unknown scaling of the rope.
    """
    refuse(hf, hidden_act="silu")
    rope = rotary(hf)
    kinds = {"full_attention": Attention(rope), "sliding_attention": Attention(rope, window=hf.sliding_window)}
    return Decoder(hf=hf, attention=by_layer_type(hf, kinds), qkv_bias=True)
