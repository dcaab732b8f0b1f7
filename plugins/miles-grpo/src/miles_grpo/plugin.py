"""The plugin. Rewards relative to their group are what several estimators share: miles_core/stages/advantage.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_core.config import RunConfig
from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from miles_core.stages.advantage import Values
    from miles_core.types import Batch


class Grpo:
    """Group-relative advantages (GRPO, arXiv:2402.03300; by options Dr. GRPO), also of several rewards apart (GDPO)."""

    provides = ("compares:grpo", "compares:gdpo", "needs-no-log-prob-pass")

    def __init__(self, config: RunConfig):
        self.algorithm, self._rollout = config.algorithm, config.rollout

    @hookimpl(name="grpo")
    def advantage(self, batch: Batch) -> Values:
        """(r - mean) / (std + 1e-6) over the rollouts of each group, less the KL penalty of each token if there is one.

        Source: arXiv:2402.03300, section 4.1.2.
        """
        from miles_core.stages.advantage import penalised
        from miles_grpo.advantage import group_relative

        return penalised(batch, group_relative(batch, self.algorithm), self.algorithm)

    @hookimpl("advantage", name="gdpo")
    def decoupled(self, batch: Batch) -> Values:
        """Rewards of several scorers, each relative to its group before they are added up, less the KL penalty.

        Source: arXiv:2601.05242, section 3.
        """
        from miles_core.stages.advantage import penalised
        from miles_grpo.advantage import decoupled

        weights = dict(zip(self._rollout.rm_type, self._rollout.rm_weights, strict=True))
        return penalised(batch, decoupled(batch, self.algorithm, weights), self.algorithm)
