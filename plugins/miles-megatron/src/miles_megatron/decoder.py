"""A shared description of decoders: pre-norm attention and a gated MLP, which a family fills in part by part.

A family is a function from a checkpoint's config.json to a `Decoder`; everything it leaves out is Llama's. The names of
tensors are those that transformers' decoders share. No torch here.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from miles_core.errors import ConfigError
from miles_megatron.mixture import Mixture, dense_mlp
from miles_megatron.specs import Attention, ModelSpec, Packed, Rotary, Rule, Warming, WeightMap

_SCALINGS = ("default", "linear", "llama3", "yarn", "proportional")
_NEVER = {
    "softmax_type": "vanilla", "apply_query_key_layer_scaling": False, "window_size": None,
    "window_attn_skip_freq": None, "no_rope_freq": None, "glu_linear_offset": 0.0, "activation_func_clamp_value": None,
}  # fmt: skip
"""Fields of TransformerConfig that would make another model; no layer here reads them, so none may be set."""

UNGATED = ("relu2",)
"""Activations of MLPs without a gate."""

Kind = TypeVar("Kind", bound=Attention | None)

_OURS, _THEIRS = "decoder.layers.{layer}.", "model.layers.{layer}."


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """Names of a layer's norms in the checkpoint; the two before attention and MLP are there or not, together, unless
    `reshape` takes the latter away, and so are the two after them."""

    before_attention: str | None = "input_layernorm"
    before_mlp: str | None = "post_attention_layernorm"
    after_attention: str | None = None
    after_mlp: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoder:
    """What the decoder of one checkpoint is made of.

    Args:
        hf: its transformers config, for the sizes.
        attention: one entry per layer, see `every_layer`; None of a layer that is an MLP alone.
        lone: a layer that has an attention has no MLP after it.
        norms: their names.
        zero_centred_norms: a norm multiplies with 1 + weight.
        qk_norm: a norm on each head of q and k.
        wide_qk_norm: one norm over all heads of q together, and one over those of k.
        qkv_bias: q, k and v have biases.
        linear_bias: every projection has one.
        fused_qkv: the checkpoint keeps q, k and v as one tensor.
        fused_gate_up: the checkpoint keeps gate and up as one tensor.
        activation, residual_scale, layer_scalar, embedding_scale, logit_scale, logit_softcap: see ModelSpec.
        softmax_scale: factor on attention scores; None for head_dim^-0.5.
        reshape, beside_embedding: functions that make what nothing here describes: see ModelSpec.
        constants, defaults, also: further fields of TransformerConfig and options that may be repeated: see ModelSpec.
        mixture: the mixtures of experts that some or all layers have for an MLP; see mixture.py.
        mlp: rules of the MLPs where they are neither these nor one dense MLP per layer.
        mixing: rules of the token mixers where they are not one attention per layer; the norms around them excepted.
        left, left_counts, renamed, packed, carried: see WeightMap.
    """

    hf: object
    attention: tuple[Attention | None, ...]
    lone: bool = False
    norms: LayerNorms = LayerNorms()
    zero_centred_norms: bool = False
    qk_norm: bool = False
    wide_qk_norm: bool = False
    qkv_bias: bool = False
    linear_bias: bool = False
    fused_qkv: bool = False
    fused_gate_up: bool = False
    activation: str = "silu"
    softmax_scale: float | None = None
    residual_scale: float = 1.0
    layer_scalar: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    reshape: Callable[..., None] | None = None
    beside_embedding: Callable[..., object] | None = None
    constants: Mapping[str, object] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    also: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    mixture: Mixture | None = None
    mlp: tuple[Rule, ...] | None = None
    mixing: tuple[Rule, ...] | None = None
    left: tuple[str, ...] = ()
    left_counts: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    packed: tuple[Packed, ...] = ()
    carried: tuple[str, ...] = ()

    def spec(self) -> ModelSpec:
        """The architecture."""
        hf = self.hf
        constants = {
            "num_layers": hf.num_hidden_layers,
            "hidden_size": hf.hidden_size,
            "num_attention_heads": hf.num_attention_heads,
            "num_query_groups": hf.num_key_value_heads,
            "kv_channels": head_dim(hf),
            "ffn_hidden_size": getattr(hf, "intermediate_size", None) or self.mixture.width,
            "layernorm_epsilon": hf.rms_norm_eps,
            "normalization": "RMSNorm",
            "layernorm_zero_centered_gamma": self.zero_centred_norms,
            "qk_layernorm": self.qk_norm or self.wide_qk_norm,
            "add_bias_linear": self.linear_bias,
            "add_qkv_bias": self.qkv_bias or self.linear_bias,
            "gated_linear_unit": self.activation not in UNGATED,
            "softmax_scale": self.softmax_scale,
            "rotary_interleaved": any(one.rotary is not None and one.rotary.interleaved for one in self._mixers),
            **_NEVER,
            # Otherwise checkpoints have one tensor for all layers' parameters of a name.
            **({"hetereogenous_dist_checkpoint": True} if len(self._alike(range(hf.num_hidden_layers))) > 1 else {}),
            **({} if self.mixture is None else self.mixture.constants),
            **self.constants,
        }
        defaults = {**({} if self.mixture is None else self.mixture.defaults), **self.defaults}
        return ModelSpec(
            constants=constants, defaults=defaults, vocab_size=hf.vocab_size, attention=self.attention,
            tied=bool(hf.tie_word_embeddings), max_positions=hf.max_position_embeddings, source=source(hf),
            activation=self.activation, lone=self.lone, wide_qk_norm=self.wide_qk_norm,
            pre_norms=self.norms.before_attention is not None, post_norms=self.norms.after_mlp is not None,
            residual_scale=self.residual_scale, layer_scalar=self.layer_scalar,
            embedding_scale=self.embedding_scale, logit_scale=self.logit_scale, logit_softcap=self.logit_softcap,
            reshape=self.reshape, beside_embedding=self.beside_embedding,
            also={**({} if self.mixture is None else self.mixture.also), **self.also},
        )  # fmt: skip

    def weight_map(self) -> WeightMap:
        """Where its tensors go."""
        hf = self.hf
        mixing = tuple(layer for layer, one in enumerate(self.attention) if one is not None)
        mlps = tuple(layer for layer, one in enumerate(self.attention) if one is None or not self.lone)
        rules = [
            Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),
            *self._attention(mixing, mlps),
            *self._mlp(mlps),
            Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
        ]
        if not hf.tie_word_embeddings:
            rules.append(Rule("output_layer.weight", ("lm_head.weight",)))
        return WeightMap(
            rules=tuple(rule for rule in rules if rule.layers != ()), heads=hf.num_attention_heads,
            groups=hf.num_key_value_heads, head_dim=head_dim(hf),
            ignored=frozenset({"lm_head.weight"} if hf.tie_word_embeddings else ()), tied=bool(hf.tie_word_embeddings),
            left=self.left, left_counts=self.left_counts, renamed=self.renamed, packed=self.packed,
            carried=self.carried,
        )  # fmt: skip

    @property
    def _mixers(self) -> list[Attention]:
        return [one for one in self.attention if one is not None]

    def _mlp(self, layers: tuple[int, ...]) -> tuple[Rule, ...]:
        if self.mlp is not None:
            return self.mlp
        return dense_mlp(layers, self.fused_gate_up, self.linear_bias) if self.mixture is None else self.mixture.rules()

    def _attention(self, layers: tuple[int, ...], mlps: tuple[int, ...]) -> list[Rule]:
        """Of the token mixers, and of the norms of all layers."""
        def same(ours: str, theirs: str) -> Rule:
            return Rule(_OURS + ours, (_THEIRS + theirs,), layers=layers)

        mixing = [*self._qkv("weight", layers)]
        if self.qkv_bias or self.linear_bias:
            mixing += self._qkv("bias", layers)
        if self.qk_norm or self.wide_qk_norm:
            own = tuple(layer for layer in layers if not self.attention[layer].borrows)
            mixing += [Rule(f"{_OURS}self_attention.{x}_layernorm.weight", (f"{_THEIRS}self_attn.{x}_norm.weight",),
                            layers=which) for x, which in (("q", layers), ("k", own))]
        if any(one.sinks for one in self._mixers):
            mixing.append(same("self_attention.core_attention.sinks", "self_attn.sinks"))
        mixing.append(same("self_attention.linear_proj.weight", "self_attn.o_proj.weight"))
        if self.linear_bias:
            mixing.append(same("self_attention.linear_proj.bias", "self_attn.o_proj.bias"))
        norms = self.norms

        def norm(ours: str, theirs: str | None, where: tuple[int, ...]) -> list[Rule]:
            return [] if theirs is None else [Rule(f"{_OURS}{ours}.weight", (f"{_THEIRS}{theirs}.weight",),
                                                   layers=where)]

        return [*norm("input_layernorm", norms.before_attention, layers),
                *(mixing if self.mixing is None else self.mixing),
                *norm("pre_mlp_layernorm", norms.before_mlp, mlps),
                *norm("self_attn_bda.norm", norms.after_attention, layers),
                *norm("mlp_bda.norm", norms.after_mlp, mlps),
                *([Rule(_OURS + "mlp_bda.scalar", (_THEIRS + "layer_scalar",), layers=mlps)] * self.layer_scalar)]

    def _qkv(self, kind: str, layers: tuple[int, ...]) -> list[Rule]:
        """Of queries, keys and values: a rule for all layers with the same heads."""
        ours, theirs = f"{_OURS}self_attention.linear_qkv.{kind}", _THEIRS + "self_attn."
        if self.fused_qkv:
            heads, groups = self.hf.num_attention_heads, self.hf.num_key_value_heads
            return [Rule(ours, (f"{theirs}qkv_proj.{kind}",), "qkv_stacked", layers, sections=(heads, groups, groups))]
        return [Rule(ours, tuple(f"{theirs}{part}_proj.{kind}" for part in parts), "same" if parts == "q" else "qkv",
                     tuple(those), head_dim=head_dim, groups=groups)
                for (parts, head_dim, groups), those in self._alike(layers).items()]

    def _alike(self, layers: Iterable[int]) -> dict[tuple[str, int | None, int | None], list[int]]:
        """(projections, channels of a head, key-value heads) -> the layers with attention that have these."""
        kinds: dict[tuple[str, int | None, int | None], list[int]] = {}
        for layer in layers:
            if (one := self.attention[layer]) is not None:
                parts = "q" if one.borrows else "qk" if one.key_is_value else "qkv"
                kinds.setdefault((parts, one.head_dim, one.groups), []).append(layer)
        return kinds


@dataclass(frozen=True, slots=True)
class DecoderFamily:
    """A Family made of a function that describes the decoder of a checkpoint."""

    describe: Callable[[object], Decoder]

    def model_spec(self, hf) -> ModelSpec:
        """
        Raises:
            ConfigError: a variant that is not modelled.
        """
        return self.describe(hf).spec()

    def weight_map(self, hf) -> WeightMap:
        """The same decoder's tensors."""
        return self.describe(hf).weight_map()


def beside_tower(hf, describe: Callable[[object], Decoder]) -> Decoder:
    """The text model of one that sees, as those are built that follow LLaVA: a vision tower and a projector beside it.

    An architecture ties the embeddings of all its checkpoints where config.json is silent; one that has an output layer
    of its own, and a text model that says that it does, keeps it.

    Args:
        describe: the text model by its own configuration.
    """
    text, names = copy.copy(hf.text_config), stored_names(hf)
    own_head = not text.tie_word_embeddings and any(name.endswith("lm_head.weight") for name in names)
    text.tie_word_embeddings = hf.tie_word_embeddings and not own_head
    modules = any(name.startswith(_MODULES[0][1]) for name in names)
    return replace(describe(text), renamed=_MODULES if modules else _RELEASED, carried=tuple(
        ("model." if modules else "") + name for name in ("vision_tower.", "multi_modal_projector.")))


_RELEASED = (("model.", "language_model.model."), ("lm_head.", "language_model.lm_head."))
_MODULES = (("model.", "model.language_model."),)
"""The text model's names in the files of the releases, and in files that have those of transformers' modules."""


def every_layer(hf, attention: Attention) -> tuple[Attention, ...]:
    """The same attention in all layers."""
    return (attention,) * hf.num_hidden_layers


def by_layer_type(hf, kinds: Mapping[str, Kind]) -> tuple[Kind, ...]:
    """The attention of each layer by its entry in config.json's `layer_types`.

    Raises:
        ConfigError: a type that `kinds` does not have.
    """
    if unknown := sorted(set(hf.layer_types) - kinds.keys()):
        raise _unsupported(hf, f"layers of type {unknown[0]!r}", hf.layer_types)
    return tuple(kinds[name] for name in hf.layer_types)


def rotary(
    hf, parameters: Mapping[str, object] | None = None, *, partial: bool = False, interleaved: bool = False,
    fraction: float | None = None,
) -> Rotary:
    """The rotary embedding that config.json describes.

    Args:
        parameters: transformers' rope_parameters; by default the config's own.
        partial: whether the family may turn a part of each head only.
        fraction: what part that is, where other keys of the config say it.

    Raises:
        ConfigError: a scaling other than linear, llama3 and yarn, or a part where the family has none.
    """
    if parameters is None:
        stated = {key: value for key, value in (hf.rope_parameters or {}).items() if key == "partial_rotary_factor"}
        hf.standardize_rope_params()  # as transformers does when it builds the model, which may move keys in
        parameters = {**hf.rope_parameters, **stated}  # older releases put the architecture's usual part over it
    rope = dict(parameters or {})
    scaling = rope.get("rope_type", "default")
    if scaling not in _SCALINGS:
        raise _unsupported(hf, f"rope_type other than {', '.join(_SCALINGS)}", scaling)
    partial_factor = float(rope.get("partial_rotary_factor", 1.0))
    if partial_factor not in (1, fraction) and not partial:
        raise _unsupported(hf, "partial_rotary_factor other than 1", partial_factor)
    read = {"default": {}, "yarn": _YARN}.get(scaling, _SCALED)
    scaled = {ours: rope[name] for name, ours in read.items() if rope.get(name) is not None}
    if scaling == "yarn":
        scaled = {"low": 1.0, "high": 32.0, "original": hf.max_position_embeddings, **scaled}
        scaled.setdefault("factor", hf.max_position_embeddings / scaled["original"])
        scaled["magnitude"] = _magnitude(rope, scaled["factor"])
    return Rotary(
        theta=float(rope.get("rope_theta") or hf.rope_theta), fraction=fraction or partial_factor,
        interleaved=interleaved, scaling=scaling, axes=_axes(rope), **scaled,
    )  # fmt: skip


def _axes(rope: Mapping[str, object]) -> tuple[int, ...]:
    """Of each frequency, from the numbers that the axes have: one axis after another; or interleaved, by turns, and the
    first where one has had its own."""
    sections = tuple(rope.get("mrope_section") or ())
    if not rope.get("mrope_interleaved"):
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    turns = (number % len(sections) for number in range(sum(sections)))
    return tuple(axis if number < sections[axis] * len(sections) else 0 for number, axis in enumerate(turns))


def warming(hf) -> Warming | None:
    """How queries grow, of the architectures whose rope_parameters say it (Ministral 3, Mistral 4); None for not."""
    rope = hf.rope_parameters
    slope = rope.get("llama_4_scaling_beta")
    return Warming(slope, rope["original_max_position_embeddings"]) if slope else None


_SCALED = {"factor": "factor", "low_freq_factor": "low", "high_freq_factor": "high",
           "original_max_position_embeddings": "original"}
_YARN = {"factor": "factor", "beta_slow": "low", "beta_fast": "high", "original_max_position_embeddings": "original",
         "truncate": "whole"}
"""Keys of rope_parameters -> fields of Rotary."""


def yarn_magnitude(factor: float, slope: float = 1.0) -> float:
    """By how much what is turned grows where positions are stretched by a factor (YaRN, section 3.4)."""
    return 0.1 * slope * math.log(factor) + 1 if factor > 1 else 1.0


def _magnitude(rope: Mapping[str, object], factor: float) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    slopes = rope.get("mscale"), rope.get("mscale_all_dim")
    if all(slopes):
        return yarn_magnitude(factor, slopes[0]) / yarn_magnitude(factor, slopes[1])
    return yarn_magnitude(factor)


def refuse(hf, **wanted: object) -> None:
    """Refuse a checkpoint whose config.json has another value than the one that the family models.

    Raises:
        ConfigError: names the key and its value.
    """
    for name, value in wanted.items():
        got = getattr(hf, name, value)
        if (bool(got) if isinstance(value, bool) else got) != value:
            raise _unsupported(hf, f"{name} other than {value!r}", got)


def head_dim(hf) -> int:
    """Channels of a head."""
    return getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads


def source(hf) -> str:
    """Where a config was read, for messages."""
    return getattr(hf, "_name_or_path", "") or "config.json"


def stored_names(hf) -> frozenset[str]:
    """Names of the tensors of the checkpoint that a config was read from; none where that has no weights."""
    from miles_megatron.shards import tensor_files

    folder = Path(source(hf))
    return frozenset(tensor_files(folder)) if any(folder.glob("*.safetensors")) else frozenset()


def stored_shape(hf, end: str) -> list[int] | None:
    """Of the first tensor of that checkpoint whose name ends so; None where there is none."""
    from miles_megatron.shards import stored_tensors, tensor_files

    name = min((name for name in stored_names(hf) if name.endswith(end)), default=None)
    return stored_tensors(tensor_files(Path(source(hf)))[name])[name].shape if name else None


def _unsupported(hf, what: str, got: object) -> ConfigError:
    return ConfigError(f"{hf.model_type} with {what} is not supported", code="architecture-variant-unsupported",
                       got=got, who=source(hf),
                       fix="use a checkpoint without it, or write a model_spec plugin (docs/model-families.md)")
