"""EXAONE 4 (arXiv:2507.11407). No torch here: a plan may import this."""

from __future__ import annotations

from typing import Any

from miles_megatron.decoder import Decoder, LayerNorms, by_layer_type, refuse, rotary
from miles_megatron.specs import Attention

_NORMS = LayerNorms(before_attention=None, before_mlp=None, after_attention="post_attention_layernorm",
                    after_mlp="post_feedforward_layernorm")


def exaone4(hf: Any) -> Decoder:
    """Norms behind attention and MLP, norms on q and k; layers with windows turn, the others have no rope.

    Without windows all layers turn.

    Raises:
        ConfigError: another activation, another kind of layer, an unknown scaling of the rope.
    """
    refuse(hf, hidden_act="silu", attention_bias=False, mlp_bias=False)
    rope, window = rotary(hf), hf.sliding_window
    kinds = {"full_attention": Attention(None if window else rope), "sliding_attention": Attention(rope, window)}
    return Decoder(hf=hf, attention=by_layer_type(hf, kinds), norms=_NORMS, qk_norm=True)
