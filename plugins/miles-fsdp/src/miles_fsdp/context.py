"""Context parallelism: ranks that share the rows of each micro-batch, and change them for heads around attention.

Each rank has a stretch of the packed rows and computes on it alone, but for attention: there it has all rows of some of
the heads, by an all-to-all before and one after (Ulysses, arXiv:2309.14509). Log-probs, which are few numbers, are
brought together, so that losses see whole samples; every rank then works out the same loss, and follows it back through
its own rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Context:
    """The ranks that share rows; `group` is None where it is one alone."""

    index: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def stretch(self, rows: int, index: int | None = None) -> slice:
        """This rank's of so many rows, which divide; or another's."""
        each, index = rows // self.size, self.index if index is None else index
        return slice(each * index, each * (index + 1))

    def to_heads(self, rows: torch.Tensor) -> torch.Tensor:
        """[T / size, H, D] of this rank -> [T, H / size, D]."""
        if self.size == 1:
            return rows
        length, heads, wide = rows.shape
        parts = rows.view(length, self.size, heads // self.size, wide).transpose(0, 1)
        return _exchange(parts, self.group).reshape(length * self.size, heads // self.size, wide)

    def to_rows(self, heads: torch.Tensor) -> torch.Tensor:
        """[T, H / size, D] -> [T / size, H, D], the inverse."""
        if self.size == 1:
            return heads
        length, count, wide = heads.shape
        parts = _exchange(heads.reshape(self.size, length // self.size, count, wide), self.group)
        return parts.transpose(0, 1).reshape(length // self.size, self.size * count, wide)

    def whole(self, own: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """[counts of this rank, ...] -> [sum of counts, ...] in the order of the ranks.

        Every rank derives the same loss from the result, so what flows back is its own part of one gradient.
        """
        return own if self.size == 1 else cast("torch.Tensor", cast("Any", _Whole).apply(
            own, self, list(counts)))


ALONE = Context()


class _Exchange(torch.autograd.Function):
    """[size, ...]: part i goes to rank i, and part i of the result is from it."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group, parts = group, parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchange(gradients[0], ctx.group), None


def _exchange(parts: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    return cast("torch.Tensor", cast("Any", _Exchange).apply(parts, group))


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, context: Context, counts: list[int]) -> torch.Tensor:
        ctx.mine = slice(sum(counts[: context.index]), sum(counts[: context.index + 1]))
        filled = own.new_zeros(max(counts), *own.shape[1:])  # ranks have unequal numbers of trained rows
        filled[: len(own)] = own
        parts = own.new_empty(context.size * max(counts), *own.shape[1:])
        dist.all_gather_into_tensor(parts, filled, group=context.group)
        return torch.cat([part[:count] for part, count in zip(parts.chunk(context.size), counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradients[0][ctx.mine], None, None
