"""One vocabulary for the modules of every trainer: the names that Hugging Face's modules have.

A trainer that runs transformers' own module needs no translation. Megatron's modules are other ones; but every family
says which parameter stands for which tensors of a checkpoint, and so also which module for which: the one below whose
name lie exactly the tensors of the other.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from miles_megatron import tensor_merges
from miles_megatron.weights import instances

if TYPE_CHECKING:
    from miles_megatron.specs import Rule, WeightMap

_LAYER = re.compile(r"^decoder\.layers\.(\d+)(?=\.|$)")
_EXPERTS = re.compile(r"\.experts(\.|$)")
"""Rows of experts lie in the order of their dispatch, which says nothing of tokens."""


@dataclass(frozen=True, slots=True)
class Named:
    """A module and what its tensors are called.

    Args:
        names: the Hugging Face modules that it is: several where their matrices are stacked in one.
        leaf: no other named module is a part of it.
        rule: how the outputs of several lie in its own; as the rows of their weights do.
        parallel: the axis of its weight that tensor-parallel ranks share: 0 its outputs, 1 its inputs; None: neither.
    """

    module: torch.nn.Module
    names: tuple[str, ...]
    leaf: bool
    rule: Rule | None = None
    parallel: int | None = None


def named_modules(chunk: torch.nn.Module, weight_map: WeightMap | None) -> Iterator[Named]:
    """The modules of a trainer's model that have a name in the vocabulary.

    Args:
        weight_map: of Megatron's model; None where module names are Hugging Face's already.
    """
    if weight_map is None:
        yield from _verbatim(chunk)
        return
    ours: dict[str, set[str]] = defaultdict(set)
    theirs: dict[str, set[str]] = defaultdict(set)
    rules: dict[str, tuple[Rule | None, tuple[str, ...]]] = {}
    for parameter, rule, tensors in instances(weight_map):
        rules[parameter] = rule, tensors
        for prefix in _prefixes(parameter):
            ours[prefix].update(tensors)
        for tensor in tensors:
            for prefix in _prefixes(tensor):
                theirs[prefix].add(tensor)
    numbers = [layer.layer_number - 1 for layer in _decoder(chunk)]
    taken: set[str] = set()
    # Parts before the whole: of modules that are one and the same the innermost computes it.
    for name, module in reversed([*chunk.named_modules()]):
        name = _LAYER.sub(lambda match: f"decoder.layers.{numbers[int(match[1])]}", name)
        if name not in ours or _EXPERTS.search(name):
            continue
        same = _same(ours[name], theirs)
        leaf = not any(other.startswith(f"{name}.") for other in ours)
        stacked, tensors = (rules.get(f"{name}.weight") if leaf else None) or (None, ())
        if same is not None and same not in taken:
            taken.add(same)
            yield Named(module, (same,), leaf, stacked, _parallel(module))
        elif same is None and stacked is not None:
            yield Named(module, tuple(one.removesuffix(".weight") for one in tensors), leaf, stacked, _parallel(module))


def split_output(named: Named, rows: torch.Tensor, weight_map: WeightMap | None, ranks: int
                 ) -> Iterator[tuple[str, int, torch.Tensor]]:
    """(name, number of the piece, [T, features]) of the outputs that are stacked in one: they lie as the weights do.

    Ranks share each piece by itself, so that all of its parts can be put side by side.

    Args:
        rows: [T, features] of this rank.
        ranks: among which the module's outputs are cut.
    """
    rule = named.rule
    if rule is None or weight_map is None or rule.join == "same":
        yield named.names[0], 0, rows
        return
    if not tensor_merges.whole_groups(rule, weight_map, ranks):  # what comes after them is compared
        return
    pieces = iter(tensor_merges.split(rule, rows.T.contiguous(), weight_map, ranks))
    counts = map(len, tensor_merges.stacks(rule)) if rule.join in tensor_merges.STACKED else [1] * len(rule.hf)
    for name, count in zip(named.names, counts, strict=True):
        yield from ((name, number, next(pieces).T) for number in range(count))


def _verbatim(chunk: torch.nn.Module) -> Iterator[Named]:
    for name, module in chunk.named_modules():
        if name and next(module.parameters(), None) is not None:
            leaf = not any(next(child.parameters(), None) is not None for child in module.children())
            yield Named(module, (of_text(name),), leaf)


def of_text(name: str) -> str:
    """The name in a model of text alone, of what is the text model of a larger one."""
    return name.replace("language_model.", "")


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts)))


def _same(tensors: set[str], theirs: dict[str, set[str]]) -> str | None:
    """The longest name below which lie these tensors and no others."""
    first, *others = (one.split(".")[:-1] for one in sorted(tensors))
    for count in range(len(first), 0, -1):
        name = ".".join(first[:count])
        if all(other[:count] == first[:count] for other in others):
            return name if theirs[name] == tensors else None
    return None


def _parallel(module: Any) -> int | None:
    weight = getattr(module, "weight", None)
    return getattr(weight, "partition_dim", None) if getattr(weight, "tensor_model_parallel", False) else None


def _decoder(chunk: Any) -> Any:
    return getattr(getattr(chunk, "decoder", None), "layers", ())
