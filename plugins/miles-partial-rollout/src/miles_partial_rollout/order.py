"""Order: which of the groups that were called back goes on first. All orders keep every group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from miles_core.types import Group, Status


def to_go(group: Group, most: int) -> int:
    """Tokens that the group's unfinished samples may still draw.

    Args:
        most: response tokens of a sample.
    """
    return sum(most - sample.response_length for sample in group.samples if sample.status is Status.ABORTED)


ORDERS: Mapping[str, Callable[[Group, int], int]] = MappingProxyType({
    "fifo": lambda group, most: 0,
    "stalest": lambda group, most: group.oldest_version,
    "most-complete": to_go,
})
"""Name -> what is smallest of the group that goes on first; among equals, who was called back first."""


def ordered(groups: Sequence[Group], order: str, most: int) -> list[Group]:
    """The groups in the order of that name."""
    return sorted(groups, key=lambda group: ORDERS[order](group, most))
