"""Qwen2 (arXiv:2407.10671), Qwen2.5 (arXiv:2412.15115), their mixture of experts, Qwen2.5-VL (arXiv:2502.13923),
Qwen3-VL (arXiv:2511.21631), dense and with experts, and MiMo (arXiv:2505.07608)."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from miles_megatron.decoder import Decoder, by_layer_type, every_layer, refuse, rotary, stored_names, stored_shape
from miles_megatron.hf_config import read_as
from miles_megatron.mixture import Mixture, Names
from miles_megatron.specs import Attention, Packed


def qwen2(hf: Any) -> Decoder:
    """Llama with biases on q, k and v; the layers after `max_window_layers` may have a sliding window.

    Raises:
        ConfigError: another activation, an unknown scaling of the rope.
    """
    refuse(hf, hidden_act="silu")
    rope = rotary(hf)
    kinds = {"full_attention": Attention(rope), "sliding_attention": Attention(rope, window=hf.sliding_window)}
    return Decoder(hf=hf, attention=by_layer_type(hf, kinds), qkv_bias=True)


def qwen2_5_vl(hf: Any) -> Decoder:
    """Qwen2 whose rope turns by three axes of a position, beside a vision tower; both are trained on text alike.

    Raises:
        ConfigError: as `qwen2`.
    """
    text, names = copy.copy(hf.text_config), stored_names(hf)
    text.tie_word_embeddings = hf.tie_word_embeddings
    text.rope_parameters = {"mrope_section": [16, 24, 24], **(text.rope_parameters or {})}
    text.head_dim = text.hidden_size // text.num_attention_heads  # whatever the config says, as transformers does
    inside = any(name.startswith("model.language_model.") for name in names)
    return replace(qwen2(text), renamed=(("model.", "model.language_model."),) if inside else (),
                   carried=("model.visual." if inside else "visual.",))


def qwen3_vl(hf: Any) -> Decoder:
    """Qwen3 whose rope turns by three axes in turns, beside a vision tower that has features for its first layers, too.

    Raises:
        ConfigError: biases of attention, another activation, an unknown scaling of the rope.
    """
    text = copy.copy(hf.text_config)
    text.tie_word_embeddings = hf.tie_word_embeddings
    # What transformers' module has where they are missing, and whatever they say.
    text.rope_parameters = {"mrope_section": [24, 20, 20], **(text.rope_parameters or {}), "mrope_interleaved": True}
    refuse(text, attention_bias=False, hidden_act="silu")
    return Decoder(hf=text, attention=every_layer(text, Attention(rotary(text))), qk_norm=True, reshape=_deepstack,
                   renamed=(("model.", "model.language_model."),), carried=("model.visual.",))


def qwen3_vl_moe(hf: Any) -> Decoder:
    """Qwen3-VL with experts in some or all layers, which the files keep in two tensors a layer.

    Those of the releases have inputs before outputs, those that transformers 5 writes have not. It looks at the shape.

    Raises:
        ConfigError: as `qwen3_vl`.
    """
    text, each = hf.text_config, Names()
    count, size, width = text.num_experts, text.hidden_size, text.moe_intermediate_size
    mixture = Mixture(layers=text.num_hidden_layers, sparse=_sparse(text), experts=count,
                      chosen=text.num_experts_per_tok, width=width)
    both, down = (f"mlp.experts.{part}" for part in ("gate_up_proj", "down_proj"))
    packed = (Packed(both, (each.gate, each.up), count, stored_shape(hf, both) != [count, 2 * width, size]),
              Packed(down, (each.down,), count, stored_shape(hf, down) != [count, size, width]))
    return replace(qwen3_vl(hf), mixture=mixture, packed=packed)


def _deepstack(*layer: Any) -> None:
    from miles_specs_qwen2.deepstack import reshape

    reshape(*layer)


def qwen2_moe(hf: Any) -> Decoder:
    """Qwen2 with experts in some or all layers, beside one that every token passes by a gate of its own.

    Raises:
        ConfigError: as `qwen2`.
    """
    mixture = Mixture(
        layers=hf.num_hidden_layers, sparse=_sparse(hf), experts=hf.num_experts, chosen=hf.num_experts_per_tok,
        width=hf.moe_intermediate_size, shared=hf.shared_expert_intermediate_size, normalised=hf.norm_topk_prob,
        names=Names(shared="mlp.shared_expert.", shared_gate="mlp.shared_expert_gate.weight"),
    )  # fmt: skip
    return replace(qwen2(hf), qkv_bias=bool(hf.qkv_bias), mixture=mixture)


def _sparse(hf: Any) -> tuple[int, ...]:
    """The layers with experts, as transformers' Qwen2MoeDecoderLayer has it."""
    return tuple(layer for layer in range(hf.num_hidden_layers)
                 if layer not in hf.mlp_only_layers and (layer + 1) % hf.decoder_sparse_step == 0)


def mimo(hf: Any) -> Decoder:
    """Qwen2 with layers for drafting, under a name that transformers does not know.

    The release's own modeling file makes its MiMoForCausalLM of transformers' Qwen2 and nothing else.

    Raises:
        ConfigError: as `qwen2`; no biases on q, k and v.
    """
    qwen = read_as(hf, "qwen2")
    refuse(qwen, attention_bias=True)
    drafting = ("num_nextn_predict_layers",) if getattr(qwen, "num_nextn_predict_layers", 0) else ()
    return replace(qwen2(qwen), left=("model.mtp_layers.",), left_counts=drafting)
