"""The plugin. Rewards relative to their group are what several estimators share: miles_core/stages/advantage.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_core.config import RunConfig
from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from miles_core.stages.advantage import Values
    from miles_core.types import Batch


class Grpo:
    """Group-relative advantages (GRPO, arXiv:2402.03300), without the deviation those of Dr. GRPO."""

    provides = ("compares:grpo", "needs-no-log-prob-pass")

    def __init__(self, config: RunConfig):
        self.algorithm = config.algorithm

    @hookimpl(name="grpo")
    def advantage(self, batch: Batch) -> Values:
        """(r - mean) / (std + 1e-6) over the rollouts of each group, less the KL penalty of each token if there is one.

        Source: arXiv:2402.03300, section 4.1.2.
        """
        from miles_core.stages.advantage import penalised
        from miles_grpo.advantage import group_relative

        return penalised(batch, group_relative(batch, self.algorithm), self.algorithm)
