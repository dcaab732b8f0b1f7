"""Architectures in Megatron's words: what a checkpoint fixes about the model, and where each of its tensors goes.

A family is anything with the two methods of `Family`; a plugin adds one under its `model_type`. Most families are
decoders that differ in a few parts, which `decoder.py` describes. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

TOWERS = r"(?:.*\.)?(?:vision|visual|audio)\w*\."
"""Beginning of the names of tensors that read images or sound, as a regular expression."""


@dataclass(frozen=True, slots=True)
class Rotary:
    """A rotary position embedding (Su et al., arXiv:2104.09864).

    Args:
        theta: its base.
        fraction: share of each head that is turned; the rest passes through.
        interleaved: pairs are (x[0], x[1]), (x[2], x[3]) ...; otherwise x[i] goes with x[i + half].
        scaling: "default", "linear" (every frequency by 1/factor: Chen et al., arXiv:2306.15595), "llama3" (only the
            low ones, with a smooth transition: Llama 3, arXiv:2407.21783, as transformers computes it), "yarn" (by
            the turns that a frequency makes: Peng et al., arXiv:2309.00071) or "proportional" (the pairs and their
            frequencies are those of whole heads, of which `fraction` turn: Gemma 4, as transformers computes it).
        factor: of the scalings.
        low, high, original: of llama3: the two frequency factors and the positions of the first training; of yarn:
            turns over these positions up to which a frequency is scaled, and from which it stays.
        whole: of yarn: the transition begins and ends at whole channels.
        magnitude: factor on what is turned.
        axes: of a position, by which each frequency turns (Wang et al., arXiv:2409.12191): those that it leaves out by
            the first. Tokens of text are at one position on all of them.
    """

    theta: float
    fraction: float = 1.0
    interleaved: bool = False
    scaling: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192
    whole: bool = True
    magnitude: float = 1.0
    axes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Warming:
    """A query at position p is multiplied with 1 + slope x log(1 + floor((p + first) / step)) (arXiv:2501.19399).

    Args:
        slope, step: see above.
        first: what positions are counted from.
    """

    slope: float
    step: int
    first: int = 0


@dataclass(frozen=True, slots=True)
class Attention:
    """How the queries of one layer look at keys.

    Args:
        rotary: their positions; None where queries and keys are as they are (NoPE, arXiv:2305.19466).
        window: keys that a query sees, its own included; None for all before it.
        softcap: scores become softcap x tanh(scores / softcap) before the mask (Gemma 2, arXiv:2408.00118).
        sinks: each head has a number that counts among its scores and whose share is of no value (gpt-oss,
            arXiv:2508.10925); a parameter of the core attention.
        warming: queries grow with their position, once they are turned.
        head_dim, groups: channels of a head, and key-value heads, of a layer that has others than the model's.
        value_norm: each head of the values is divided by its root mean square.
        key_is_value: values are what the projection of keys gives, and have none of their own.
        lends, borrows: keys and values are kept for layers above, or are those of a layer below and only queries are
            projected. What hands them from layer to layer is the family's (`ModelSpec.reshape`).
        mixer: makes the layer's token mixer where it is not Megatron's SelfAttention: latent attention, linear
            attention. Called with (config, this, rope, modules), all of module_specs.py; returns the ModuleSpec that
            takes the place of `self_attention`. A function of a module, which may import torch when it is called.
    """

    rotary: Rotary | None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    warming: Warming | None = None
    head_dim: int | None = None
    groups: int | None = None
    value_norm: bool = False
    key_is_value: bool = False
    lends: bool = False
    borrows: bool = False
    mixer: Callable[..., Any] | None = None

    @property
    def plain(self) -> bool:
        """Whether Megatron's SelfAttention by the model's config is what stands around the core attention."""
        return not (self.head_dim or self.groups or self.value_norm or self.key_is_value or self.lends or self.borrows)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """An architecture, as far as the checkpoint decides it.

    Args:
        constants: fields of TransformerConfig that the checkpoint fixes; an override may repeat but not change them.
        defaults: fields that the family prefers and an override may change.
        also: options of Megatron's -> values that say of its own layers what the checkpoint says, where the layers here
            have other fields, or none. Repeated they change nothing.
        vocab_size: rows of the embedding.
        attention: one entry per layer of the whole model; None of a layer that is an MLP alone.
        lone: a layer that has an attention has no MLP after it (Nemotron-H, arXiv:2504.03624).
        tied: the output layer is the embedding.
        max_positions: longest sequence that the checkpoint was made for.
        source: where this was read, for messages.
        activation: of the gated MLP: "silu", "gelu_pytorch_tanh", "clamped_swiglu" or "clamped_silu" (both of
            layers.py); or "relu2", of one without a gate.
        wide_qk_norm: the norms of q and k go over all heads together.
        pre_norms: the inputs of attention and MLP pass a norm.
        post_norms: the outputs of attention and MLP pass a norm before they join the residual.
        residual_scale: factor on these outputs.
        layer_scalar: each layer multiplies what it gives with a number of the checkpoint, which is not trained; of
            models with norms on outputs.
        embedding_scale: factor on the embedding's output.
        logit_scale: factor on the logits.
        logit_softcap: logits become softcap x tanh(logits / softcap); None for plain ones.
        reshape: changes a layer that is otherwise put together, where nothing above says how it differs. Called with
            (config, its ModuleSpec, its Attention, whether its MLP is a mixture, modules), all of module_specs.py. A
            function of a module, which may import torch when it is called.
        beside_embedding: makes a module of the first stage, `beside_embedding` of the model, from (config, modules). It
            is called with token ids [b, T] and their embeddings [t, b, H], t = T / tensor with sequence parallelism,
            and gives what the first layer sees: wider rows, where the family's layers take these apart.
    """

    constants: Mapping[str, object]
    vocab_size: int
    attention: tuple[Attention | None, ...]
    tied: bool
    max_positions: int
    source: str = field(compare=False)
    defaults: Mapping[str, object] = field(default_factory=dict)
    also: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    activation: str = "silu"
    lone: bool = False
    wide_qk_norm: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    residual_scale: float = 1.0
    layer_scalar: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    reshape: Callable[..., None] | None = None
    beside_embedding: Callable[..., Any] | None = None

    @property
    def rotary(self) -> Rotary:
        """The last that there is, which is that of all layers but in models with windows in between."""
        ropes = (one.rotary for one in reversed(self.attention) if one is not None)
        return next((rope for rope in ropes if rope is not None), Rotary(1.0, 0.0))


@dataclass(frozen=True, slots=True)
class Rule:
    """How tensors of a checkpoint and parameters of the model stand for each other.

    Args:
        megatron: name of a parameter, or of a persistent buffer (a router's bias), which is loaded, streamed, saved
            and converted like one; `{layer}` and `{expert}` count from 0 over the whole model.
        hf: the tensors that it is made of, in order.
        join: "same" for one tensor, "rows" to stack along axis 0, "halves" for one tensor that is two stacked already
            (each of which is cut among tensor-parallel ranks), "sections" for several of the sizes `sections`, "qkv"
            for Megatron's order per query group (of queries and keys where `hf` has no values), "qkv_gate" for the same
            where the first tensor has, head by head, a query and the gate of its output, "qkv_stacked" for the same of
            one tensor, of the sections (queries, keys, values).
        layers: the layers that have it; None for a parameter outside the layers.
        experts: how many experts have it; 0 for a parameter without expert.
        optional: a checkpoint may lack it, with all others of the same word or True; it then starts as it was drawn.
        sections: relative sizes of what is stacked in the tensor of the joins "sections" and "qkv_stacked".
        stacks: how many of the sections each of several such tensors has; empty for one tensor with all of them.
        head_dim, groups: of these layers, where they are not the WeightMap's.
    """

    megatron: str
    hf: tuple[str, ...]
    join: str = "same"
    layers: tuple[int, ...] | None = None
    experts: int = 0
    optional: bool | str = False
    sections: tuple[int, ...] = ()
    stacks: tuple[int, ...] = ()
    head_dim: int | None = None
    groups: int | None = None


@dataclass(frozen=True, slots=True)
class Packed:
    """One tensor of the files, [experts, ...], in the place of those that each expert of a layer has.

    Args:
        stored: end of its name.
        parts: ends of the names that a rule has for an expert's tensors; `{expert}` counts from 0, and is not there of
            what all experts share, [1, ...]. Several lie in the one tensor along their rows.
        experts: how many.
        transposed: a matrix of an expert is stored [inputs, outputs].
        alternating: the rows of several parts take turns, rather than that one part follows the other.
        within: beginnings of the names that have this form.
        mxfp4: there may be two tensors of rounded numbers in its place (mxfp4.py), [experts, outputs, ...]; they are
            read, not written.
    """

    stored: str
    parts: tuple[str, ...]
    experts: int
    transposed: bool = False
    alternating: bool = False
    within: tuple[str, ...] = ("",)
    mxfp4: bool = False


@dataclass(frozen=True, slots=True)
class WeightMap:
    """All tensors of a model, in the order in which they are streamed.

    Args:
        rules: one or more Rule.
        heads, groups, head_dim: for the joins "qkv", "qkv_gate" and "qkv_stacked".
        ignored: names of a checkpoint that stand for nothing, such as a tied lm_head written out again.
        tied: whether the output layer is the embedding.
        left: beginnings of names of tensors that the model leaves in the checkpoint, which is announced: layers for
            drafting. A plugin that adds rules for them takes them in.
        left_counts: keys of config.json that count those layers; 0 in a checkpoint that is written without them.
        added_counts: (key of config.json, number) of drafting layers that the rules have and the checkpoint does not.
        renamed: (beginning of names in the rules, the same in the files), of a model that is a part of a larger one.
        packed: tensors of the files that hold several of the rules'.
        carried: beginnings of names of tensors that are no part of the model, such as a vision tower's: an export has
            them as the checkpoint had.
    """

    rules: tuple[Rule, ...]
    heads: int
    groups: int
    head_dim: int
    ignored: frozenset[str] = frozenset()
    tied: bool = False
    left: tuple[str, ...] = ()
    left_counts: tuple[str, ...] = ()
    added_counts: tuple[tuple[str, int], ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    packed: tuple[Packed, ...] = ()
    carried: tuple[str, ...] = ()


class Family(Protocol):
    """What a plugin offers for a model_type. `hf` is a transformers PretrainedConfig."""

    def model_spec(self, hf: Any) -> ModelSpec: ...

    def weight_map(self, hf: Any) -> WeightMap: ...
