"""Tensors of experts that lie side by side in one storage, seen as one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import torch

ALIGNMENT = 16
"""Bytes: where a matrix of a grouped product may begin."""


def as_one(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """[E, *shape] view of E tensors of one shape that lie evenly spaced in one storage; None of others."""
    first, step = tensors[0].detach(), tensors[0].nbytes
    if len(tensors) > 1:
        step = tensors[1].data_ptr() - first.data_ptr()
    start, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    even = all(one.data_ptr() == start + number * step and one.is_contiguous()
               and one.untyped_storage().data_ptr() == storage for number, one in enumerate(tensors))
    if not even or step < first.nbytes or step % ALIGNMENT or start % ALIGNMENT:
        return None
    return first.as_strided((len(tensors), *first.shape), (step // first.itemsize, *first.stride()))


class StackedParameter(torch.nn.Parameter):
    """The same layer's parameters of several experts that lie side by side: [experts, ...], a view of them."""

    @classmethod
    def of(cls, together: torch.Tensor, first: torch.nn.Parameter) -> StackedParameter:
        """
        Args:
            together: [experts, ...].
            first: one of the parameters; the others are cut among ranks as it is.
        """
        stack = cls(together, requires_grad=False)
        for name in ("allreduce", "tensor_model_parallel", "partition_dim"):
            if hasattr(first, name):
                setattr(stack, name, getattr(first, name))
        return stack


def stacks(named: Iterable[tuple[str, torch.Tensor]], grouped_name: re.Pattern[str]
           ) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of grouped experts that lie side by side as one, `weight0-63` for weight0 to weight63; others as
    they are.

    Args:
        grouped_name: what a grouped expert's name has in it; it ends in the expert's number.
    """
    grouped: dict[str, dict[int, torch.nn.Parameter]] = {}
    for name, parameter in named:
        stem = name.rstrip("0123456789")
        if stem == name or not grouped_name.search(name):
            yield name, parameter
        else:
            grouped.setdefault(stem, {})[int(name[len(stem):])] = parameter
    for stem, experts in grouped.items():
        in_order = [experts[number] for number in range(len(experts)) if number in experts]
        if len(in_order) < len(experts) or (together := as_one(in_order)) is None:
            yield from ((f"{stem}{number}", parameter) for number, parameter in experts.items())
        else:
            yield f"{stem}0-{len(experts) - 1}", StackedParameter.of(together, experts[0])
