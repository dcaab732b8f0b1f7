"""The built-in families: Qwen3 (arXiv:2505.09388), dense and with a mixture of experts."""

from __future__ import annotations

from dataclasses import replace

from miles_megatron.decoder import Decoder, DecoderFamily, every_layer, refuse, rotary
from miles_megatron.mixture import Mixture
from miles_megatron.specs import Attention, Family


def qwen3(hf) -> Decoder:
    """GQA with a norm on q and k, SwiGLU, RMSNorm, no biases."""
    refuse(hf, attention_bias=False, use_sliding_window=False, hidden_act="silu")
    return Decoder(hf=hf, attention=every_layer(hf, Attention(rotary(hf))), qk_norm=True)


def qwen3_moe(hf) -> Decoder:
    """Qwen3 with experts in all or some layers; softmax router in fp32, no shared expert."""
    # transformers' Qwen3MoeDecoderLayer
    sparse = tuple(layer for layer in range(hf.num_hidden_layers)
                   if layer not in (hf.mlp_only_layers or ()) and (layer + 1) % hf.decoder_sparse_step == 0)
    mixture = Mixture(layers=hf.num_hidden_layers, sparse=sparse, experts=hf.num_experts,
                      chosen=hf.num_experts_per_tok, width=hf.moe_intermediate_size, normalised=hf.norm_topk_prob)
    return replace(qwen3(hf), mixture=mixture)


FAMILIES: dict[str, Family] = {"qwen3": DecoderFamily(qwen3), "qwen3_moe": DecoderFamily(qwen3_moe)}
"""The built-in families by model_type."""
