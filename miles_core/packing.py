"""Packing and balancing: which samples share a micro-batch, and which rank gets it. Numbers in, indices out."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from itertools import count, pairwise

from miles_core.errors import BatchError


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


def in_steps(rollouts: Sequence[Hashable], steps: int) -> list[list[int]]:
    """A batch's samples for each optimizer step: whole rollouts in the order of their first sample, every one once.

    Each step gets as many rollouts as the others, or one more where they do not divide.

    Args:
        rollouts: which rollout each sample belongs to.

    Raises:
        BatchError: there are fewer rollouts than steps.
    """
    members: dict[Hashable, list[int]] = {}
    for index, rollout in enumerate(rollouts):
        members.setdefault(rollout, []).append(index)
    whole = list(members.values())
    if len(whole) < steps:
        raise BatchError("the batch has fewer rollouts than optimizer steps", code="batch-below-steps",
                         got=f"{len(rollouts)} samples of {len(whole)} rollouts for {steps} steps",
                         who="rollout.num_steps_per_rollout", fix="lower --num-steps-per-rollout, or sample more")
    ends = [len(whole) * step // steps for step in range(steps + 1)]
    return [[index for siblings in whole[start:end] for index in siblings] for start, end in pairwise(ends)]


def fixed(count: int, size: int) -> list[list[int]]:
    """Consecutive bins of `size` indices; the last may be smaller."""
    return [list(range(start, min(start + size, count))) for start in range(0, count, size)]


def oversized(lengths: Sequence[int], capacity: int | None) -> list[int]:
    """Indices of the samples that exceed the capacity on their own; none where there is no capacity."""
    return [] if capacity is None else [index for index, length in enumerate(lengths) if length > capacity]


def karmarkar_karp(loads: Sequence[float], parts: int, *, equal: bool) -> list[list[int]]:
    """Parts of about the same load: the largest differencing method (Karmarkar and Karp, UCB/CSD-82-113, 1982).

    Of all partial solutions the two whose loads differ most are merged, the heaviest part of one with the lightest of
    the other, until one is left. Ties go to the lower index, so the result depends on the loads alone.

    With `equal` every partial solution starts with one item in each part, taken from the loads in order (balanced
    largest differencing, Michiels et al., 2003); a merge never spreads further than the wider of its two.

    Args:
        loads: not negative.
        equal: whether every part has the same number of items.

    Returns:
        `parts` lists of ascending indices, the heaviest first.

    Raises:
        ValueError: `equal`, and the items do not divide among the parts.
    """
    if equal and len(loads) % parts:
        raise ValueError(f"{len(loads)} items do not divide into {parts} parts of the same size")
    order = sorted(range(len(loads)), key=lambda i: -loads[i])
    step = parts if equal else 1
    starts = [[(loads[i], [i]) for i in order[at : at + step]] for at in range(0, len(order), step)]
    number = count()  # the older solution first where two are equally wide
    heap = [(_spread(start, parts), next(number), start) for start in starts]
    heapq.heapify(heap)
    while len(heap) > 1:
        wide, other = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = _merge(wide, other, parts)
        heapq.heappush(heap, (_spread(merged, parts), next(number), merged))
    final = heap[0][2] if heap else []
    return [sorted(items) for _, items in final] + [[] for _ in range(parts - len(final))]


Solution = list[tuple[float, list[int]]]
"""(load, items) of each part that is not empty, the heaviest first."""


def _spread(solution: Solution, parts: int) -> float:
    """Minus the distance from the heaviest part to the lightest: the widest solution comes off a heap first."""
    return (solution[-1][0] if len(solution) == parts else 0) - solution[0][0]


def _merge(one: Solution, other: Solution, parts: int) -> Solution:
    empty: tuple[float, list[int]] = (0, [])
    one, other = (solution + [empty] * (parts - len(solution)) for solution in (one, other))
    pairs = zip(one, reversed(other), strict=True)
    merged = [(a + b, items + more) for (a, items), (b, more) in pairs if items or more]
    return sorted(merged, key=lambda part: -part[0])


def schedule(lengths: Sequence[int], *, data: int, capacity: int | None, micro_batch_size: int, multiple: int = 1,
             loads: Sequence[float] | None = None, balance: bool = True) -> list[list[list[int]]]:
    """The micro-batches of one optimizer step for each data-parallel rank; every rank gets the same number.

    With a capacity: first-fit-decreasing bins, of which the heaviest that has several samples is halved until they are
    a multiple of data x multiple. If all are alone before that, bins of the index after the last are added: the
    shortest sample once more, with nothing to train on. Without: consecutive ones of `micro_batch_size`. They are dealt
    by Karmarkar and Karp over the loads, each rank's heaviest first. One rank keeps the order of the packing.

    Args:
        lengths: tokens of each of the step's samples.
        data: data-parallel ranks.
        capacity: tokens of a micro-batch, max_tokens_per_gpu x context-parallel size; a longer sample rides alone
            (`oversized` names those). None for micro-batches of a fixed size.
        micro_batch_size: samples of a micro-batch where there is no capacity.
        multiple: each rank's number of micro-batches is a multiple of it (Layout.micro_batch_multiple).
        loads: what to balance, for each sample; its tokens by default.
        balance: False deals the micro-batches in turn, in the order in which they were packed.

    Returns:
        rank -> micro-batches -> ascending indices into `lengths`.

    Raises:
        BatchError: there is no sample, or those of a fixed number do not divide.
    """
    loads = lengths if loads is None else loads
    unit = data * multiple
    packed = fixed(len(lengths), micro_batch_size) if capacity is None else (
        _split(first_fit_decreasing(lengths, capacity), loads, unit))
    if capacity is not None and packed and (missing := -len(packed) % unit):
        packed, loads = [*packed, *[[len(lengths)]] * missing], [*loads, loads[lengths.index(min(lengths))]]
    if not packed or len(packed) % unit:
        raise BatchError(f"a step's micro-batches cannot be dealt to {data} ranks, which take a multiple of {unit}",
                         code="micro-batches-not-divisible", who="rollout.global_batch_size",
                         got=f"{len(lengths)} samples, {micro_batch_size} at a time, hence {len(packed)}",
                         fix=f"make global_batch_size a multiple of {unit}, or --use-dynamic-batch-size")
    if data == 1:
        return [packed]
    if not balance:
        return [packed[rank::data] for rank in range(data)]
    weights = [sum(loads[i] for i in part) for part in packed]
    dealt = karmarkar_karp(weights, data, equal=True)
    return [[packed[i] for i in sorted(part, key=lambda i: -weights[i])] for part in dealt]


def _split(bins: list[list[int]], loads: Sequence[float], unit: int) -> list[list[int]]:
    """Halve the heaviest bin of several samples until the bins are a multiple of `unit`, or all samples are alone."""
    bins = list(bins)
    while len(bins) % unit:
        several = [b for b, items in enumerate(bins) if len(items) > 1]
        if not several:
            break
        heaviest = max(several, key=lambda b: sum(loads[i] for i in bins[b]))
        items = bins[heaviest]
        halves = karmarkar_karp([loads[i] for i in items], 2, equal=False)
        bins[heaviest : heaviest + 1] = [[items[i] for i in half] for half in halves]
    return bins
