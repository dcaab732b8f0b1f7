"""Verdicts: which GPU, node or rack is to blame, by who is slow with whom.

A unit that is slow with every partner is bad; a group of which every unit is slow with every unit outside, and that has
more than one, is bad as a group, and its units are not. What is left is the way between two.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Blame:
    """What explains the slow pairs.

    Args:
        units, groups: those to blame, each with a reason.
        pairs: slow ones that none of them explains.
    """

    units: dict[str, str] = field(default_factory=dict)
    groups: dict[str, str] = field(default_factory=dict)
    pairs: dict[Pair, str] = field(default_factory=dict)


def rounds(units: Sequence[str]) -> Iterator[list[Pair]]:
    """A tournament: every two units meet once, and in a round each has one partner at most (the circle method)."""
    ring: list[str | None] = [*units, *([None] if len(units) % 2 else [])]
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        yield [(one, other) for one, other in zip(ring[:half], reversed(ring[half:])) if one and other]
        ring = [ring[0], ring[-1], *ring[1:-1]]


def low(values: Mapping[str, float], share: float) -> dict[str, str]:
    """Who has less than a share of the median (of an even number the higher one)."""
    if not values:
        return {}
    median = statistics.median_high(values.values())
    return {name: f"{value / median:.0%} of the median {median:.3g}" for name, value in values.items()
            if value < share * median}


def blame(speeds: Mapping[Pair, float], group_of: Mapping[str, str], share: float) -> Blame:
    """Tell bad units from bad groups.

    Args:
        speeds: of pairs, 0 for one that failed. Those within a group and across groups are judged apart, each by what
            its units reach with their best partner: less than a share of the median of that is slow.
        group_of: the group of each unit, "" for none.
    """
    slow: dict[Pair, str] = {}
    for inside in (True, False):
        kind = {pair: speed for pair, speed in speeds.items() if _inside(pair, group_of) == inside}
        best = {unit: max(speed for pair, speed in kind.items() if unit in pair) for pair in kind for unit in pair}
        median = statistics.median_high(best.values()) if best else 0.0
        slow |= {pair: f"{speed / median:.0%} of the median" for pair, speed in kind.items() if speed < share * median}
    groups = {group: reason for group in sorted({*group_of.values()} - {""})
              if (reason := _group(group, speeds, slow, group_of))}
    open_pairs = [pair for pair in speeds if not {group_of.get(unit, "") for unit in pair} & groups.keys()]
    units = {unit: f"slow with each of {len(own)} partners" for unit in sorted({*sum(open_pairs, ())})
             if len(own := [pair for pair in open_pairs if unit in pair]) > 1 and slow.keys() >= {*own}}
    unexplained = {pair: slow[pair] for pair in open_pairs if pair in slow and not units.keys() & {*pair}}
    return Blame(units, groups, unexplained)


def _group(group: str, speeds: Mapping[Pair, float], slow: Collection[Pair], group_of: Mapping[str, str]) -> str:
    """Why a group is to blame, "" if it is not."""
    members = {unit for unit, its in group_of.items() if its == group}
    across = [pair for pair in speeds if len(members & {*pair}) == 1]
    within = [pair for pair in speeds if members >= {*pair}]
    pairs = across or within
    if len(members & {*sum(pairs, ())}) < 2 or not {*pairs} <= {*slow}:
        return ""
    if not across:
        return "all its pairs are slow"
    return "slow with all others, " + ("and within" if {*within} <= {*slow} else "fast within")


def _inside(pair: Pair, group_of: Mapping[str, str]) -> bool:
    one, other = (group_of.get(unit, "") for unit in pair)
    return bool(one) and one == other
