"""What a decoder of `{{ cookiecutter.family }}` is made of. No torch here: a plan may import this."""

from __future__ import annotations

from typing import Any

from miles_megatron.decoder import Decoder, every_layer, refuse, rotary
from miles_megatron.specs import Attention


def decoder(hf: Any) -> Decoder:
    """A Llama, with biases on q, k and v where config.json says so. Read modeling_{{ cookiecutter.family }}.py and change it.

    Raises:
        ConfigError: a checkpoint that this would compute as another model.
    """
    # 1. Keys of config.json that would make another model: every value but these is refused, by the key's name.
    refuse(hf, hidden_act="silu", mlp_bias=False, attention_out_bias=False)

    # 2. An attention for each layer. A part of each head turns: rotary(hf, partial=True). Pairs are neighbours:
    #    interleaved=True. No rope: Attention(None). Windows, softcaps, sinks: fields of Attention. By config.json's
    #    layer_types: by_layer_type(hf, {"full_attention": ..., "sliding_attention": ...}).
    attention = every_layer(hf, Attention(rotary(hf)))

    # 3. The rest: norms=LayerNorms(...), qk_norm, linear_bias, activation, fused_qkv, mixture=Mixture(...), and what
    #    else Miles's page on model families has under "Add a family".
    return Decoder(hf=hf, attention=attention, qkv_bias=bool(getattr(hf, "attention_bias", False)))
