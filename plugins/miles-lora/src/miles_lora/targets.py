"""Which layers get adapters, and under which names: rules beside those of the layers themselves. No torch here.

A layer of the model may be several layers of the checkpoint (q, k and v; gate and up); each of those has an adapter of
its own, because that is what PEFT and SGLang know.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from miles_megatron.specs import Packed, Rule, WeightMap

from miles_core.errors import ConfigError

ALL = "all-linear"
OPTIONAL = "lora"
"""Of the adapters' rules: a checkpoint has all adapters or none."""

PEFT = "base_model.model."
"""Before the names of PEFT's tensors."""
INSIDE = ("model.language_model.", "language_model.model.", "language_model.")
"""Beginnings of the names of a text model inside another: in transformers' modules, in releases and in older modules.
Adapters may have any of them, whatever the files of their base have."""
LINEAR = re.compile(r"^(?!per_layer_).*_proj|^w[123]$")
"""Last words of the names of linear layers, in the families that there are; routers and norms have others: Gemma 4's
router is called proj alone. What puts its further embeddings into layers, per_layer_projection, gets no adapter."""
_GATE, _UP = ("gate_proj", "gate_up_proj", "w1"), ("up_proj", "gate_up_proj", "w3")
MEGATRON = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"), "linear_q": ("q_proj",), "linear_k": ("k_proj",),
    "linear_v": ("v_proj",), "linear_proj": ("o_proj",), "linear_fc1": _GATE + _UP, "linear_fc1_gate": _GATE,
    "linear_fc1_up": _UP, "linear_fc2": ("down_proj", "w2"), "linear_q_proj": ("q_proj",),
    "linear_q_down_proj": ("q_a_proj",), "linear_q_up_proj": ("q_b_proj",),
    "linear_kv_down_proj": ("kv_a_proj_with_mqa",), "linear_kv_up_proj": ("kv_b_proj",),
    "in_proj": ("in_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba"),
}  # fmt: skip
"""Last words of Megatron's names of layers -> those that families have for the same in a checkpoint."""
PATH = re.compile(r"(?:(?:\w+\.)*layers\.)?\*\.(?:self_attention|mlp(?:\.(experts|shared_experts))?)")
"""What may be before them: that of all layers, which leaves whether they are experts'."""
_EXPERTS = re.compile(r"\.(?:(experts)|shared_experts?)\.")
LATENT, PLAIN = "kv_a_proj_with_mqa", ("q_proj", "k_proj", "v_proj")
"""A layer that latent attention alone has, and those of other attention, which lists of Miles name beside it."""
_ADAPTER = re.compile(re.escape(PEFT) + r"(.+)\.lora_([AB])\.weight")
_OF_EXPERT, OF_ALL_EXPERTS = re.compile(r"(\.experts)\.\d+(?=\.)"), re.compile(r"\.experts\.(?!\d+\.)")
"""In the names of what one expert has, and of what all of a layer share."""


@dataclass(slots=True)
class Switch:
    """Whether the adapters of a model act."""

    on: bool = True


@dataclass(frozen=True, slots=True)
class Target:
    """A layer of the model, with the layers of the checkpoint that it is made of.

    Args:
        rule: of its weight.
        module: pattern of its name.
        parts: last words of those layers' names, in their order.
        adapted: those of them that get an adapter.
        shared: experts of a layer share what they can of an adapter; see `outer`.
    """

    rule: Rule
    module: str
    parts: tuple[str, ...]
    adapted: tuple[str, ...]
    shared: bool = False

    @property
    def outer(self) -> str:
        """Which of A and B all experts of a layer share: what meets the hidden states. Empty where each has its own."""
        if not (self.shared and self.rule.experts):
            return ""
        return "B" if self.module.endswith("linear_fc2") else "A"

    def rules(self) -> tuple[Rule, ...]:
        """Of the adapters: A of each part and then B."""
        from miles_megatron.tensor_merges import STACKED, stacks  # has torch, which a plan does without

        rules: list[Rule] = []
        for number, (part, name) in enumerate(zip(self.parts, self.rule.hf, strict=True)):
            if part not in self.adapted:
                continue
            stem = PEFT + name.removesuffix(".weight")
            where: dict[str, Any] = {"layers": self.rule.layers, "experts": self.rule.experts, "optional": OPTIONAL}
            # The rows of B are those of the layer, and a layer of stacked pieces has them cut piece by piece.
            stacked = Rule("", (), **where)
            if self.rule.join in STACKED:
                stacked = replace(self.rule, sections=stacks(self.rule)[number], stacks=(), **where)
            halves = {"A": Rule(f"{self.module}.adapters.{part}_A", (f"{stem}.lora_A.weight",), **where),
                      "B": replace(stacked, megatron=f"{self.module}.adapters.{part}_B", hf=(f"{stem}.lora_B.weight",))}
            if self.outer:
                halves[self.outer] = replace(
                    halves[self.outer], experts=0, hf=(_of_all(halves[self.outer].hf[0]),),
                    megatron=f"{self.module.replace('local_experts.{expert}', 'adapters')}.{part}_{self.outer}")
            rules += halves.values()
        return tuple(rules)

    def packed(self) -> tuple[Packed, ...]:
        """How adapters of experts that share lie in SGLang's files: [experts, ...], and what is shared [1, ...]."""
        if not self.outer:
            return ()
        ends = [rule.hf[0].rpartition("{layer}")[2] for rule in self.rules()]
        return tuple(Packed(_of_all(end), (end,), self.rule.experts if "{expert}" in end else 1, within=(PEFT,))
                     for end in ends)


def targets(weight_map: WeightMap, wanted: Sequence[str], excluded: Sequence[str], shared: bool = False
            ) -> tuple[Target, ...]:
    """What gets adapters.

    Args:
        wanted: see `chosen`.
        excluded: those of them that do not.
        shared: see Target.

    Raises:
        ConfigError: a name that the model does not have, or nothing is left.
    """
    linear = [rule for rule in weight_map.rules if rule.megatron.startswith("decoder.layers.")
             and rule.megatron.endswith(".weight") and all(LINEAR.search(last(name)) for name in rule.hf)]
    names = choice({name for rule in linear for name in rule.hf}, wanted, excluded)
    matched = []
    for rule in linear:
        parts = tuple(last(name) for name in rule.hf)
        if adapted := tuple(part for part, name in zip(parts, rule.hf, strict=True) if name in names):
            matched.append(Target(rule, rule.megatron.removesuffix(".weight"), parts, adapted, shared))
    return tuple(matched)


def choice(names: Collection[str], wanted: Sequence[str], excluded: Sequence[str]) -> set[str]:
    """Those of a model's layers that get adapters.

    Args:
        names: of all its linear layers.
        wanted, excluded: see `chosen`.

    Raises:
        ConfigError: a name that the model does not have, or nothing is left.
    """
    known, passed = ", ".join(sorted({*map(last, names)})), without_plain_attention(names, wanted)
    for flag, listed in (("--target-modules", wanted), ("--exclude-modules", excluded)):
        if unknown := [target for target in listed if target not in (ALL, *passed)
                       and not any(_named(name, target) for name in names)]:
            raise ConfigError("the model has no linear layers of this name", got=", ".join(unknown), who=flag,
                              fix=f"choose from {known}, or write {ALL}", code="lora-target-unknown")
    adapted = {name for name in names if chosen(name, wanted, excluded)}
    if not adapted:
        raise ConfigError("no layer is left to get an adapter", who="--target-modules, --exclude-modules",
                          fix=f"choose from {known}", code="lora-no-target-left")
    return adapted


def chosen(name: str, wanted: Iterable[str], excluded: Iterable[str]) -> bool:
    """Whether a layer of a checkpoint gets an adapter.

    Args:
        wanted: last words of names, such as q_proj; Megatron's, such as linear_qkv, perhaps with its path to that of
            all layers before it; all-linear stands for those that LINEAR knows.
        excluded: those of them that do not.
    """
    return any(_named(name, target) for target in wanted) and not any(_named(name, target) for target in excluded)


def of_all_layers(target: str) -> bool:
    """Whether a target is of every layer of a model, as `chosen` takes them."""
    path = target.rpartition(".")[0]
    return not path or PATH.fullmatch(path) is not None


def without_plain_attention(names: Iterable[str], wanted: Iterable[str]) -> list[str]:
    """What of a list names no layer because the model's attention is latent; Miles passes over it, too."""
    last_words = {*map(last, names)}
    return [target for target in wanted if LATENT in last_words and target in PLAIN and target not in last_words]


def _named(name: str, target: str) -> bool:
    if target == ALL:
        return LINEAR.search(last(name)) is not None
    path, _, word = target.rpartition(".")
    if last(name) not in MEGATRON.get(word, (word,)):
        return False
    place = PATH.fullmatch(path)
    if not path or place is None:
        return not path
    experts = _EXPERTS.search(name)
    return place[1] == (experts and (experts[1] or "shared_experts"))


def added(weight_map: WeightMap, chosen: Sequence[Target]) -> WeightMap:
    """The map with the adapters, each before the layer that it belongs to: in a stream they come first."""
    rules = {target.rule: target.rules() for target in chosen}
    packed = dict.fromkeys(one for target in chosen for one in target.packed())
    return replace(weight_map, packed=(*weight_map.packed, *packed), rules=tuple(
        one for rule in weight_map.rules for one in (*rules.get(rule, ()), rule)))


def without(weight_map: WeightMap) -> WeightMap:
    """The inverse of `added`."""
    return replace(weight_map, rules=tuple(rule for rule in weight_map.rules if rule.optional != OPTIONAL),
                   packed=tuple(one for one in weight_map.packed if one.within != (PEFT,)))


def alone(weight_map: WeightMap) -> WeightMap:
    """The adapters of a map, which a checkpoint has to have."""
    return replace(weight_map, ignored=frozenset(), left=(), renamed=(), rules=tuple(
        replace(rule, optional=False) for rule in weight_map.rules if rule.optional == OPTIONAL))


def adapter_of(name: str) -> tuple[str, str] | None:
    """(weight that it changes, "A" or "B") of an adapter's tensor; None for any other."""
    match = _ADAPTER.fullmatch(name)
    return match and (f"{match[1]}.weight", match[2])


def by_itself(name: str) -> str:
    """What a tensor of a text model is called where that lies in no other."""
    return next((f"model.{name.removeprefix(outer)}" for outer in INSIDE if name.startswith(outer)), name)


def called_as(names: Iterable[str]) -> Callable[[str], str]:
    """Whatever a text model's weight is called -> which of these names it has; others stay as they are."""
    own = {by_itself(name): name for name in names}
    return lambda name: own.get(by_itself(name), name)


def names_of(weight: str) -> tuple[str, str]:
    """The tensors of the adapter of a weight."""
    stem = PEFT + weight.removesuffix(".weight")
    return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"


def names_among(weight: str, known: Container[str]) -> tuple[str, str]:
    """The same, of all experts where this one has no half by itself that is known."""
    first, second = (name if name in known else _of_all(name) for name in names_of(weight))
    return first, second


def of_expert(name: str) -> str:
    """The inverse of `_of_all`, with `{expert}` where the expert's number is."""
    return OF_ALL_EXPERTS.sub(".experts.{expert}.", name)


def _of_all(name: str) -> str:
    """What all experts share, by the name of what one has."""
    return _OF_EXPERT.sub(r"\1", name.replace(".{expert}.", "."))


def words(text: str) -> tuple[str, ...]:
    """Of a list with commas."""
    return tuple(filter(None, (word.strip() for word in text.split(","))))


def last(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]
