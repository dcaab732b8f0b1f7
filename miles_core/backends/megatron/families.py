"""The built-in families: Qwen3 (arXiv:2505.09388), dense and with a mixture of experts."""

from __future__ import annotations

from dataclasses import replace

from miles_core.backends.megatron.decoder import Decoder, DecoderFamily, dense_mlp, every_layer, refuse, rotary
from miles_core.backends.megatron.specs import Attention, Family, Rule


def qwen3(hf) -> Decoder:
    """GQA with a norm on q and k, SwiGLU, RMSNorm, no biases."""
    refuse(hf, attention_bias=False, use_sliding_window=False, hidden_act="silu")
    return Decoder(hf=hf, attention=every_layer(hf, Attention(rotary(hf))), qk_norm=True)


def qwen3_moe(hf) -> Decoder:
    """Qwen3 with experts in all or some layers; softmax router in fp32, no shared expert."""
    layers = tuple(range(hf.num_hidden_layers))
    # transformers' Qwen3MoeDecoderLayer
    sparse = tuple(layer for layer in layers
                   if layer not in (hf.mlp_only_layers or ()) and (layer + 1) % hf.decoder_sparse_step == 0)
    dense = tuple(layer for layer in layers if layer not in sparse)
    constants = {
        "num_moe_experts": hf.num_experts,
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "moe_layer_freq": [int(layer in sparse) for layer in layers],
        # softmax then top-k leaves the probabilities as they are; top-k then softmax normalises them
        "moe_router_pre_softmax": not hf.norm_topk_prob,
        "moe_router_score_function": "softmax",
    }
    defaults = {"moe_router_dtype": "fp32", "moe_aux_loss_coeff": 0.0}
    expert, target = "model.layers.{layer}.mlp.experts.{expert}.", "decoder.layers.{layer}.mlp."
    ours, count = target + "experts.local_experts.{expert}.", hf.num_experts
    mlp = (
        *(dense_mlp(dense) if dense else ()),
        Rule(target + "router.weight", ("model.layers.{layer}.mlp.gate.weight",), layers=sparse),
        Rule(ours + "linear_fc1.weight", (expert + "gate_proj.weight", expert + "up_proj.weight"), "rows", sparse,
             count),
        Rule(ours + "linear_fc2.weight", (expert + "down_proj.weight",), "same", sparse, count),
    )  # fmt: skip
    return replace(qwen3(hf), constants=constants, defaults=defaults, mlp=mlp)


FAMILIES: dict[str, Family] = {"qwen3": DecoderFamily(qwen3), "qwen3_moe": DecoderFamily(qwen3_moe)}
"""The built-in families by model_type."""
