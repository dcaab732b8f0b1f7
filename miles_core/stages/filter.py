"""Stage 4, filter: keep a group or drop it with a reason that is counted; never turn a failure into a zero reward."""

from __future__ import annotations

from collections.abc import Callable

from miles_core.types import Drop, Group, Sample


def filter_group(group: Group, chain: Callable[[Group], Group | Drop] | None) -> Group | Drop:
    """What the run's filters say, in their order; a group with an unfinished sample never reaches them."""
    if unfit := unfinished(group):
        # A generator may say why in metadata["drop"]: {"reason": a word that is counted, "detail": a sentence}.
        drop = unfit[0].metadata.get("drop", {})
        return Drop(drop.get("reason", str(unfit[0].status)), drop.get(
            "detail", f"prompt {group.prompt.uid} has {len(unfit)} sample(s) that did not finish"))
    return group if chain is None else chain(group)


def unfinished(group: Group) -> list[Sample]:
    """Samples that are no answer: aborted, or failed."""
    return [sample for sample in group.samples if not sample.status.finished]
