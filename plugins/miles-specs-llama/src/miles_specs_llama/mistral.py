"""Mistral (arXiv:2310.06825), Ministral, Ministral 3 and Mistral Small 4: the text model, alone or beside a tower."""

from __future__ import annotations

from typing import Any

from miles_megatron.decoder import Decoder, beside_tower, by_layer_type, every_layer, refuse, rotary, warming
from miles_megatron.latent import Latent
from miles_megatron.mixture import Mixture, after
from miles_megatron.specs import Attention, Packed


def mistral(hf: Any) -> Decoder:
    """Llama without biases, whose queries may see the last `sliding_window` keys only and may grow with their position.

    Raises:
        ConfigError: another activation, an unknown scaling of the rope.
    """
    refuse(hf, hidden_act="silu")
    attention = Attention(rotary(hf), window=hf.sliding_window, warming=warming(hf))
    return Decoder(hf=hf, attention=every_layer(hf, attention))


def ministral(hf: Any) -> Decoder:
    """Mistral some of whose layers have a window.

    Raises:
        ConfigError: as `mistral`.
    """
    refuse(hf, hidden_act="silu")
    windows = {"full_attention": None, "sliding_attention": hf.sliding_window}
    rope = rotary(hf)
    return Decoder(hf=hf, attention=by_layer_type(hf, {kind: Attention(rope, window=window)
                                                       for kind, window in windows.items()}))


def mistral4(hf: Any) -> Decoder:
    """Latent attention whose queries grow with their position, experts by a softmax, shared experts.

    Raises:
        ConfigError: another activation, experts in groups, an unknown scaling of the rope.
    """
    refuse(hf, hidden_act="silu", num_key_value_heads=hf.num_attention_heads, n_group=1)
    latent = Latent(query_rank=hf.q_lora_rank, rank=hf.kv_lora_rank, plain=hf.qk_nope_head_dim,
                    turned=hf.qk_rope_head_dim, value=hf.v_head_dim, bias=bool(hf.attention_bias))
    mixture = Mixture(
        layers=hf.num_hidden_layers, sparse=after(hf.num_hidden_layers, hf.first_k_dense_replace),
        experts=hf.n_routed_experts, chosen=hf.num_experts_per_tok, width=hf.moe_intermediate_size,
        shared=hf.moe_intermediate_size * hf.n_shared_experts, normalised=bool(hf.norm_topk_prob),
        scale=hf.routed_scaling_factor,
    )  # fmt: skip
    names, experts = mixture.names, mixture.experts
    packed = (Packed("mlp.experts.gate_up_proj", (names.gate, names.up), experts),
              Packed("mlp.experts.down_proj", (names.down,), experts))
    return latent.decoder(hf, interleaved=bool(hf.rope_interleave), mixture=mixture, packed=packed)


_TEXT = {"mistral": mistral, "ministral": ministral, "ministral3": mistral, "mistral4": mistral4}


def mistral3(hf: Any) -> Decoder:
    """What transformers builds around a text model of any of these: Mistral Small from 3.1 on, and Ministral 3.

    Raises:
        ConfigError: another text model, or as that.
    """
    text = hf.text_config
    if text.model_type not in _TEXT:
        refuse(text, model_type="mistral")
    return beside_tower(hf, _TEXT[text.model_type])
