"""How the tensors of a rule lie in its parameter: joined, taken apart again, and as views of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from miles_megatron.specs import Rule, WeightMap

STACKED = ("halves", "sections", "qkv_stacked")
"""A tensor of the checkpoint that is several, stacked along axis 0; each is cut among tensor-parallel ranks."""


def hf_shapes(rule: Rule, full: Sequence[int], weight_map: WeightMap) -> list[list[int]]:
    """Of the HF tensors that a whole parameter of shape `full` is made of."""
    full = list(full)
    if rule.join == "same":
        return [full]
    if rule.join in STACKED:
        sizes = list(map(sum, stacks(rule)))
        return [[full[0] * size // sum(sizes), *full[1:]] for size in sizes]
    if rule.join == "rows":
        return [[full[0] // len(rule.hf), *full[1:]] for _ in rule.hf]
    size, groups = _heads(rule, weight_map)
    queries = weight_map.heads * (2 if rule.join == "qkv_gate" else 1)
    return [[count * size, *full[1:]] for count in (queries, groups, groups)[:len(rule.hf)]]


def stacks(rule: Rule) -> list[tuple[int, ...]]:
    """Relative sizes of what is stacked in each tensor of a rule of the joins STACKED."""
    sections, sizes = rule.sections or (1, 1), []
    for count in rule.stacks or (len(sections),):
        sizes.append(sections[:count])
        sections = sections[count:]
    return sizes


def pieces(rule: Rule, tensor: torch.Tensor, number: int = 0) -> tuple[torch.Tensor, ...]:
    """What of a tensor of the checkpoint, or of a rank's part of it, is cut among tensor-parallel ranks by itself.

    Args:
        number: which of the rule's tensors it is.

    Raises:
        ValueError: rows that the rule's sections do not share out evenly.
    """
    if rule.join not in STACKED:
        return (tensor,)
    return _sections(rule, tensor, stacks(rule)[number])


def _sections(rule: Rule, tensor: torch.Tensor, shares: Sequence[int]) -> tuple[torch.Tensor, ...]:
    sizes, remainders = zip(*(divmod(share * len(tensor), sum(shares)) for share in shares), strict=True)
    if any(remainders):
        raise ValueError(f"{len(tensor)} rows of {rule.megatron} do not divide into the sections {shares}")
    return tensor.split(sizes)


def whole(rule: Rule, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """The HF tensors, from the pieces of which `split` took them apart and which ranks have gathered."""
    if rule.join not in STACKED:
        return parts
    left = iter(parts)
    return [torch.cat([next(left) for _ in stack]) for stack in stacks(rule)]


def join(rule: Rule, parts: list[torch.Tensor], weight_map: WeightMap) -> torch.Tensor:
    """Pieces of HF tensors -> Megatron parameter; see Rule for the orders."""
    if rule.join == "same":
        return parts[0]
    if rule.join in ("rows", "halves", "sections"):
        return torch.cat(parts)
    query, *others = parts
    size, _ = _heads(rule, weight_map)
    groups = others[0].shape[0] // size
    if rule.join == "qkv_gate":  # head by head a query and its gate; Megatron wants a group's queries first
        query = query.unflatten(0, (groups, -1, 2, size)).transpose(1, 2).flatten(0, 3)
    return torch.cat([part.unflatten(0, (groups, -1)) for part in (query, *others)], 1).flatten(0, 1)


def split(rule: Rule, tensor: torch.Tensor, weight_map: WeightMap, ranks: int) -> tuple[torch.Tensor, ...]:
    """The inverse of `join`; `ranks` is among how many the parameter is cut."""
    if rule.join in ("halves", "sections"):
        return _sections(rule, tensor, [share for stack in stacks(rule) for share in stack])
    return tuple(view.reshape(-1, *tensor.shape[1:]) if grouped(rule) else view
                 for view in _views(rule, tensor, weight_map, ranks))


def grouped(rule: Rule) -> bool:
    """Whether rows lie by groups of heads: the queries, the key and the value of each."""
    return rule.join.startswith("qkv")


def whole_groups(rule: Rule, weight_map: WeightMap, ranks: int) -> bool:
    """Whether each of so many tensor-parallel ranks has whole groups of heads: what `split` of its part asks for."""
    return not grouped(rule) or ranks <= _heads(rule, weight_map)[1]


def has_views(rule: Rule) -> bool:
    """Whether each HF tensor lies in the parameter in one piece, as `hf_views` has it."""
    return rule.join != "qkv_stacked"


def hf_views(rule: Rule, tensor: torch.Tensor, weight_map: WeightMap, ranks: int = 1) -> tuple[torch.Tensor, ...]:
    """Where the HF tensors lie in a parameter, or in its part of `ranks`: views with their elements in their order.

    Raises:
        ValueError: a rule without `has_views`.
    """
    if not has_views(rule):
        raise ValueError(f"{rule.hf[0]} lies in {rule.megatron} in pieces")
    if rule.join in STACKED:
        return _sections(rule, tensor, list(map(sum, stacks(rule))))
    return _views(rule, tensor, weight_map, ranks)


def _heads(rule: Rule, weight_map: WeightMap) -> tuple[int, int]:
    """Channels of a head, and key-value heads."""
    return rule.head_dim or weight_map.head_dim, rule.groups or weight_map.groups


def _views(rule: Rule, tensor: torch.Tensor, weight_map: WeightMap, ranks: int) -> tuple[torch.Tensor, ...]:
    if rule.join == "same":
        return (tensor,)
    if rule.join == "rows":
        return tensor.chunk(len(rule.hf))
    size, groups = _heads(rule, weight_map)
    queries = weight_map.heads // groups * size * (2 if rule.join == "qkv_gate" else 1)
    alone = len(rule.hf) == 2  # keys, which are values too
    query, *others = tensor.unflatten(0, (groups // ranks, -1)).split((queries, *[size] * (1 if alone else 2)), 1)
    if rule.join == "qkv_gate":
        query = query.unflatten(1, (2, -1, size)).transpose(1, 2)
    return (query, *others)
