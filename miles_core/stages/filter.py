"""Stage 4, filter: keep a group or drop it with a reason that is counted; never turn a failure into a zero reward."""

from __future__ import annotations

from collections.abc import Callable

from miles_core.types import Drop, Group, Status


def filter_group(group: Group, chain: Callable[[Group], Group | Drop] | None) -> Group | Drop:
    """What the run's filters say, in their order; a group with an unfinished sample never reaches them."""
    unfit = [s.status for s in group.samples if s.status not in (Status.COMPLETED, Status.TRUNCATED)]
    if unfit:
        return Drop(str(unfit[0]), f"prompt {group.prompt.uid} has {len(unfit)} sample(s) that did not finish")
    return group if chain is None else chain(group)
