"""Llama 4: experts, and layers in which a query sees its own chunk of the sequence. The description; no torch."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

from miles_megatron.decoder import Decoder, refuse, rotary
from miles_megatron.mixture import Mixture, Names
from miles_megatron.specs import Attention, Packed, Rule, Warming

_EACH = Names(router="mlp.router.weight", shared="mlp.shared_expert.")
"""Where the files say feed_forward; no file has the experts' own names, for they are packed."""

_INSIDE = (("model.", "language_model.model."), ("lm_head.", "language_model.lm_head."))


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama4Attention:
    """As `Attention.mixer` it makes Megatron's self-attention with the core attention of llama4_attention.py.

    Args:
        chunk: a query sees the keys of its own chunk of so many positions; None for all before it.
        epsilon: queries and keys are normed behind the rope, without a weight; None where they are not.
    """

    chunk: int | None
    epsilon: float | None

    def __call__(self, config: Any, attention: Attention, rope: Any, modules: Any) -> Any:
        """See specs.Attention.mixer."""
        from miles_specs_llama import llama4_attention

        return llama4_attention.spec(self, attention, rope, modules)


def llama4_text(hf: Any) -> Decoder:
    """Chunks and a rope of neighbours in most layers, neither in the others; one expert of many beside a shared one.

    Raises:
        ConfigError: several experts per token, biases, another activation, an unknown scaling of the rope.
    """
    refuse(hf, hidden_act="silu", attention_bias=False, num_experts_per_tok=1)
    rope = rotary(hf, interleaved=True)
    warming = Warming(hf.attn_scale, hf.floor_scale, first=1) if hf.attn_temperature_tuning else None
    attention = tuple(
        Attention(rope if turned else None, warming=None if turned else warming, mixer=Llama4Attention(
            chunk=hf.attention_chunk_size if kind == "chunked_attention" else None,
            epsilon=hf.rms_norm_eps if hf.use_qk_norm and turned else None,
        )) for turned, kind in zip(hf.no_rope_layers, hf.layer_types, strict=True))  # fmt: skip
    mixture = Mixture(
        layers=hf.num_hidden_layers, sparse=tuple(hf.moe_layers), experts=hf.num_local_experts, chosen=1,
        width=hf.intermediate_size, shared=hf.intermediate_size, score="sigmoid", normalised=False, names=_EACH,
    )  # fmt: skip
    return Decoder(
        hf=hf, attention=attention, mixture=mixture, mlp=tuple(map(_in_the_files, mixture.rules())),
        packed=_packed(hf.num_local_experts),
        constants={"ffn_hidden_size": hf.intermediate_size_mlp, "moe_apply_probs_on_input": True},
        also={"no_rope_freq": (hf.no_rope_layer_interval, [int(not turned) for turned in hf.no_rope_layers])},
    )  # fmt: skip


def llama4(hf: Any) -> Decoder:
    """The text model of the releases, beside a vision model, which is left as it is.

    Raises:
        ConfigError: as `llama4_text`.
    """
    text = copy.copy(hf.text_config)
    text.tie_word_embeddings = hf.tie_word_embeddings
    return replace(llama4_text(text), renamed=_INSIDE, carried=("vision_model.", "multi_modal_projector."))


def _in_the_files(rule: Rule) -> Rule:
    return replace(rule, hf=tuple(name.replace(".mlp.", ".feed_forward.") for name in rule.hf))


def _packed(experts: int) -> tuple[Packed, ...]:
    """All experts of a layer in one tensor, as [inputs, outputs]."""
    gate, up, down = (name.replace("mlp.", "feed_forward.") for name in (_EACH.gate, _EACH.up, _EACH.down))
    return (Packed("feed_forward.experts.gate_up_proj", (gate, up), experts, transposed=True),
            Packed("feed_forward.experts.down_proj", (down,), experts, transposed=True))
