"""The plugin: options and hooks. What becomes of a group is in spans.py, which group goes on first in order.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from miles_core.config import RunConfig, option
from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from miles_core.types import Group


@dataclass(frozen=True, kw_only=True)
class PartialRolloutOptions:
    """Which group goes on first, and what is trained on of it."""

    order: Literal["fifo", "stalest", "most-complete"] = option(
        "fifo", "Which cancelled group continues first: first cancelled, of the oldest weights, or fewest tokens left."
    )
    mask_offpolicy_in_partial_rollout: bool = option(
        False, "Do not train on tokens sampled before their group was cancelled.",
        flags=("--mask-offpolicy-in-partial-rollout",),
    )


class PartialRollout:
    """Groups that were called back keep their tokens, log-probs and versions, and go on in a later rollout."""

    def __init__(self, options: PartialRolloutOptions, config: RunConfig):
        self.options, self._most = options, config.rollout.rollout_max_response_len

    @hookimpl
    def unfinished(self, group: Group) -> Group:
        """The group with all that was drawn; without samples where there is nothing to go on with."""
        from miles_partial_rollout.spans import called_back

        return called_back(group, mask=self.options.mask_offpolicy_in_partial_rollout)

    @hookimpl
    def select_from_buffer(self, groups: list[Group]) -> list[Group]:
        """The groups in the order in which they go on."""
        from miles_partial_rollout.order import ordered

        return ordered(groups, self.options.order, self._most)

    @hookimpl
    def shape_rewards(self, groups: list[Group]) -> list[Group]:
        """Rewards stay as they are; every sample of a batch says how many spans it has."""
        from miles_partial_rollout.spans import tell

        for group in groups:
            for sample in group.samples:
                tell(sample)
        return groups
