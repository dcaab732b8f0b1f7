"""Llama (arXiv:2307.09288, arXiv:2407.21783) and Mistral (arXiv:2310.06825)."""

from __future__ import annotations

from typing import Any

from miles_megatron.decoder import Decoder, every_layer, refuse, rotary
from miles_megatron.specs import Attention


def llama(hf: Any) -> Decoder:
    """The plainest decoder: GQA, SwiGLU, RMSNorm; biases on every projection or on none.

    Raises:
        ConfigError: biases in attention or MLP alone, another activation, an unknown scaling of the rope.
    """
    bias = bool(hf.mlp_bias)
    refuse(hf, hidden_act="silu", attention_bias=bias)
    return Decoder(hf=hf, attention=every_layer(hf, Attention(rotary(hf))), linear_bias=bias)


def mistral(hf: Any) -> Decoder:
    """Llama without biases, whose queries may see the last `sliding_window` keys only.

    Raises:
        ConfigError: another activation, an unknown scaling of the rope.
    """
    refuse(hf, hidden_act="silu")
    return Decoder(hf=hf, attention=every_layer(hf, Attention(rotary(hf), window=hf.sliding_window)))
