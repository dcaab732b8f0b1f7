"""Packing: which samples share a micro-batch. Integers in, indices out."""

from __future__ import annotations

from collections.abc import Sequence


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of indices whose lengths add up to at most `capacity`, longest first into the first bin with room.

    An item longer than the capacity gets a bin of its own. Ties keep their order, so the result depends on the lengths
    alone. At most 11/9 of the optimal number of bins plus one (Johnson, 1973).
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        place = next((b for b, free in enumerate(room) if length <= free), None)
        if place is None:
            bins.append([index])
            room.append(capacity - length)
        else:
            bins[place].append(index)
            room[place] -= length
    return [sorted(items) for items in bins]


def fixed(count: int, size: int) -> list[list[int]]:
    """Consecutive bins of `size` indices; the last may be smaller."""
    return [list(range(start, min(start + size, count))) for start in range(0, count, size)]
