"""Gemma 2 (arXiv:2408.00118), and the text models of Gemma 3 (arXiv:2503.19786), 3n and 4, alone or beside a tower."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from miles_megatron.decoder import Decoder, LayerNorms, beside_tower, by_layer_type, refuse, rotary
from miles_megatron.mixture import Mixture, Names, dense_mlp
from miles_megatron.specs import Attention, Packed, Rotary, Rule

_NORMS = LayerNorms(before_mlp="pre_feedforward_layernorm", after_attention="post_attention_layernorm",
                    after_mlp="post_feedforward_layernorm")  # fmt: skip


def gemma2(hf: Any) -> Decoder:
    """Sandwich norms about zero, a scaled embedding, softcaps, and sliding windows in every other layer.

    Raises:
        ConfigError: biases, bidirectional attention, another activation, an unknown scaling of the rope.
    """
    rope = rotary(hf)
    return _gemma(hf, {"sliding_attention": rope, "full_attention": rope})


def gemma3_text(hf: Any) -> Decoder:
    """Gemma 2 with norms on q and k, and a rope of its own for the layers with a window.

    Raises:
        ConfigError: as `gemma2`, and a softcap on scores, which transformers' Gemma 3 does not compute.
    """
    refuse(hf, attn_logit_softcapping=None)
    ropes = {kind: rotary(hf, hf.rope_parameters[kind]) for kind in ("sliding_attention", "full_attention")}
    return replace(_gemma(hf, ropes), qk_norm=True)


def gemma3(hf: Any) -> Decoder:
    """The text model of a Gemma 3 that sees; its vision tower and what lies between are left as they are.

    Without images its attention is causal, as in training on text.

    Raises:
        ConfigError: as `gemma3_text`.
    """
    return beside_tower(hf, gemma3_text)


def gemma4_text(hf: Any) -> Decoder:
    """Norms about one, also on q, k and v; heads of full layers have sizes of their own, and may be their own values.

    E2B and E4B have further embeddings for every layer, and upper layers that attend to keys of lower ones.

    Raises:
        ConfigError: biases, attention to later tokens of text, another activation, an unknown scaling of the rope;
            experts in a model with further embeddings; keys of lower layers in one without, or where no lower layer
            is of the kind.
    """
    refuse(hf, hidden_activation="gelu_pytorch_tanh", attention_bias=False)
    if hf.use_bidirectional_attention != "vision":  # which leaves text as it is
        refuse(hf, use_bidirectional_attention=None)
    layers = [_of_layer(hf, layer) for layer in range(hf.num_hidden_layers)]
    decoder = Decoder(
        hf=layers[0], attention=tuple(map(_gemma4_attention, layers, hf.layer_types)), norms=_NORMS,
        activation="gelu_pytorch_tanh", qk_norm=True, softmax_scale=1.0, layer_scalar=True,
        embedding_scale=hf.hidden_size**0.5, logit_softcap=hf.final_logit_softcapping,
    )  # fmt: skip
    if getattr(hf, "hidden_size_per_layer_input", 0):
        refuse(hf, enable_moe_block=False)
        return _handed_up(hf, decoder)
    refuse(hf, num_kv_shared_layers=0)  # transformers computes them with these embeddings alone
    return _side_by_side(hf, decoder) if getattr(hf, "enable_moe_block", False) else decoder


def gemma3n_text(hf: Any) -> Decoder:
    """Gemma 3 with several streams in the residual (AltUp), a shortcut beside attention (LAuReL) and MLPs some of which
    switch channels off; further embeddings for every layer, and keys of lower layers, as Gemma 4 E2B has.

    Raises:
        ConfigError: biases, another activation, an unknown scaling of the rope, MLPs of several widths, an output of
            AltUp that is not scaled, keys of lower layers where no lower layer is of the kind.
    """
    widths = hf.intermediate_size
    refuse(hf, hidden_activation="gelu_pytorch_tanh", attention_bias=False, altup_correct_scale=True,
           intermediate_size=[widths[0]] * len(widths))
    own = copy.copy(hf)
    own.intermediate_size, own.use_double_wide_mlp, own.attention_k_eq_v = widths[0], False, False
    kinds = {kind: _gemma4_attention(own, kind)
             for kind in ("sliding_attention", "full_attention")}
    decoder = _handed_up(own, Decoder(
        hf=own, attention=by_layer_type(hf, kinds), norms=_NORMS, activation="gelu_pytorch_tanh", qk_norm=True,
        softmax_scale=1.0, embedding_scale=hf.hidden_size**0.5, logit_softcap=hf.final_logit_softcapping,
    ))  # fmt: skip
    layers, streams = tuple(range(hf.num_hidden_layers)), hf.altup_num_inputs
    ends = (("beside_embedding", "altup_projections", None),
            ("decoder.layers.{layer}.streams_head", "altup_unembed_projections", layers[-1:]))
    rules = (*(rule for rule in decoder.mlp or () if not rule.megatron.endswith("per_layer_input.scalar")),
             *(Rule(f"decoder.layers.{{layer}}.{ours}", (f"model.layers.{{layer}}.{theirs}",), layers=layers)
               for ours, theirs in _STREAMS.items()),
             *(Rule(f"{ours}.streams.{number}.weight", (f"model.{theirs}.{number}.weight",), layers=which)
               for ours, theirs, which in ends for number in range(streams - 1)))
    return replace(
        decoder, mlp=rules, reshape=functools.partial(_put_streams, hf=hf, under=decoder.reshape),
        beside_embedding=functools.partial(_embed_streams, streams=streams, vocab=hf.vocab_size_per_layer_input,
                                           width=hf.hidden_size_per_layer_input),
    )  # fmt: skip


_STREAMS = {
    "altup.norm.weight": "altup.router_norm.weight", "altup.router.weight": "altup.modality_router.weight",
    "altup.prediction.weight": "altup.prediction_coefs.weight",
    "altup.correction.weight": "altup.correction_coefs.weight", "altup.output_scale": "altup.correct_output_scale",
    "laurel.left.weight": "laurel.linear_left.weight", "laurel.right.weight": "laurel.linear_right.weight",
    "laurel.norm.weight": "laurel.post_laurel_norm.weight",
}  # fmt: skip
"""Of a layer's modules in altup.py -> of a layer."""


def _put_streams(*layer: Any, hf: Any, under: Any) -> None:
    from miles_specs_gemma.altup import Streams, put_streams

    under(*layer)
    put_streams(*layer, streams=Streams(hf.altup_num_inputs, hf.altup_active_idx, hf.laurel_rank,
                                        tuple(hf.activation_sparsity_pattern)))


def _embed_streams(*model: Any, **sizes: Any) -> Any:
    from miles_specs_gemma.altup import StreamsEmbedding

    return StreamsEmbedding(*model, **sizes)


def _handed_up(hf: Any, decoder: Decoder) -> Decoder:
    """With what layers hand up to each other: further embeddings, and keys and values."""
    layers, width = tuple(range(hf.num_hidden_layers)), hf.hidden_size_per_layer_input
    attention = tuple(one for one in decoder.attention if one is not None)
    upper = hf.num_hidden_layers - (hf.num_kv_shared_layers or 0)
    if not {*attention[upper:]} <= {*attention[:upper]}:  # no lower layer has their keys
        refuse(hf, num_kv_shared_layers=0)
    lenders = sorted({max(layer for layer in layers[:upper] if attention[layer] == one) for one in attention[upper:]})
    shared = tuple(replace(one, lends=layer in lenders, borrows=layer >= upper) for layer, one in enumerate(attention))
    rules = (*dense_mlp(layers),
             *(Rule(f"decoder.layers.{{layer}}.per_layer_input.{ours}", (f"model.layers.{{layer}}.{theirs}",),
                    layers=layers) for ours, theirs in _PER_LAYER.items()),
             *(Rule(f"beside_embedding.{ours}.weight", (f"model.{theirs}.weight",))
               for ours, theirs in _BESIDE_EMBEDDING.items()))
    # Files may have what upper layers would make keys and values with.
    unused = tuple(f"model.layers.{layer}.self_attn.{part}" for layer in layers[upper:]
                   for part in ("k_proj.", "v_proj.", "k_norm.", "v_norm."))
    return replace(
        decoder, attention=shared, mlp=rules, layer_scalar=False, carried=unused,
        reshape=functools.partial(_hand_up, width=width, lenders=tuple(shared[layer] for layer in lenders),
                                  widening=2 if hf.use_double_wide_mlp else 1),
        beside_embedding=functools.partial(_embed, vocab=hf.vocab_size_per_layer_input, width=width),
    )  # fmt: skip


_PER_LAYER = {
    "gate.weight": "per_layer_input_gate.weight", "projection.weight": "per_layer_projection.weight",
    "norm.weight": "post_per_layer_input_norm.weight", "scalar": "layer_scalar",
}  # fmt: skip
_BESIDE_EMBEDDING = {"tokens": "embed_tokens_per_layer", "projection": "per_layer_model_projection",
                     "norm": "per_layer_projection_norm"}
"""Of the modules in per_layer.py -> of a layer, and of the model."""


def _hand_up(*layer: Any, **sizes: Any) -> None:
    from miles_specs_gemma.per_layer import reshape

    reshape(*layer, **sizes)


def _embed(*model: Any, **sizes: Any) -> Any:
    from miles_specs_gemma.per_layer import PerLayerEmbedding

    return PerLayerEmbedding(*model, **sizes)


def _side_by_side(hf: Any, decoder: Decoder) -> Decoder:
    """With experts beside the dense MLP of every layer."""
    layers = tuple(range(hf.num_hidden_layers))
    mixture = Mixture(layers=len(layers), sparse=layers, experts=hf.num_experts, chosen=hf.top_k_experts,
                      width=hf.moe_intermediate_size, shared=hf.intermediate_size, names=_EXPERTS)
    own = (Rule(f"decoder.layers.{{layer}}.mlp.{ours}", (f"model.layers.{{layer}}.{theirs}",), layers=layers)
           for ours, theirs in _BESIDE.items())
    return replace(decoder, mixture=mixture, mlp=(*mixture.rules(), *own), reshape=_reshape,
                   norms=replace(_NORMS, before_mlp=None), constants={"moe_shared_expert_overlap": False},
                   packed=(Packed("experts.gate_up_proj", (_EXPERTS.gate, _EXPERTS.up), hf.num_experts),
                           Packed("experts.down_proj", (_EXPERTS.down,), hf.num_experts)))


_EXPERTS = Names(
    router="router.proj.weight", gate="experts.{expert}.gate_proj.weight", up="experts.{expert}.up_proj.weight",
    down="experts.{expert}.down_proj.weight", shared="mlp.",
)  # fmt: skip
_BESIDE = {
    "before_dense.weight": "pre_feedforward_layernorm.weight",
    "after_dense.weight": "post_feedforward_layernorm_1.weight",
    "before_experts.weight": "pre_feedforward_layernorm_2.weight",
    "after_experts.weight": "post_feedforward_layernorm_2.weight",
    "router.norm.weight": "router.scale", "router.expert_scale": "router.per_expert_scale",
}  # fmt: skip
"""Of the norms and the router in side_by_side.py -> of a layer."""


def _reshape(*layer: Any) -> None:
    from miles_specs_gemma.side_by_side import reshape

    reshape(*layer)


def gemma4(hf: Any) -> Decoder:
    """The text model of a Gemma 4 that sees; its vision tower and what lies between are left as they are.

    Where patches and sound are embedded without a tower (`gemma4_unified`), so are these embeddings.

    Raises:
        ConfigError: as `gemma4_text`.
    """
    return _beside_towers(hf, gemma4_text)


def gemma3n(hf: Any) -> Decoder:
    """The text model of a Gemma 3n that sees and hears; its towers and what lies between are left as they are.

    Raises:
        ConfigError: as `gemma3n_text`.
    """
    return _beside_towers(hf, gemma3n_text)


def _beside_towers(hf: Any, describe: Callable[[Any], Decoder]) -> Decoder:
    text = beside_tower(hf, describe)
    unused = describe(hf.text_config).carried
    inside = tuple(name.replace("model.", "model.language_model.", 1) for name in unused)
    return replace(text, renamed=(("model.", "model.language_model."),),
                   carried=(*unused, *inside, "model.vision_tower.", "model.vision_embedder.", "model.embed_vision.",
                            "model.audio_tower.", "model.embed_audio."))


def _gemma4_attention(hf: Any, kind: str) -> Attention:
    """Of Gemma 3n as well, whose keys are not values.

    Args:
        hf: the configuration of one layer.
        kind: of that layer.
    """
    sliding = kind == "sliding_attention"
    return Attention(
        rotary(hf, hf.rope_parameters[kind], partial=True), hf.sliding_window if sliding else None,
        head_dim=hf.head_dim, groups=hf.num_key_value_heads, value_norm=True,
        key_is_value=bool(hf.attention_k_eq_v) and not sliding,
    )  # fmt: skip


def _of_layer(hf: Any, layer: int) -> Any:
    """What a layer's heads are; transformers has read them into every layer's own configuration since it has these."""
    if hasattr(hf, "per_layer_config"):
        return hf.per_layer_config[layer]
    own = copy.copy(hf)
    if hf.layer_types[layer] == "full_attention":
        own.head_dim = hf.global_head_dim
        own.num_key_value_heads = (hf.attention_k_eq_v and hf.num_global_key_value_heads) or hf.num_key_value_heads
    return own


def _gemma(hf: Any, ropes: Mapping[str, Rotary]) -> Decoder:
    refuse(hf, hidden_activation="gelu_pytorch_tanh", attention_bias=False, use_bidirectional_attention=False)
    softcap = hf.attn_logit_softcapping
    kinds = {kind: Attention(rope, hf.sliding_window if kind == "sliding_attention" else None, softcap)
             for kind, rope in ropes.items()}
    return Decoder(
        hf=hf, attention=by_layer_type(hf, kinds), norms=_NORMS, zero_centred_norms=True,
        activation="gelu_pytorch_tanh", softmax_scale=hf.query_pre_attn_scalar**-0.5,
        embedding_scale=hf.hidden_size**0.5, logit_softcap=hf.final_logit_softcapping,
    )  # fmt: skip
