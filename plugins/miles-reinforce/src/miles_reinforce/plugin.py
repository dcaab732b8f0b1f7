"""The plugin. The estimators are in advantage.py, imported when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_core.config import RunConfig
from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from miles_core.stages.advantage import Values
    from miles_core.types import Batch


class Reinforce:
    """Advantages without a value model: REINFORCE++, its group baseline, and leave-one-out (RLOO)."""

    provides = ("compares:rloo", "compares:reinforce_plus_plus_baseline", "needs-no-log-prob-pass")

    def __init__(self, config: RunConfig):
        self.algorithm = config.algorithm

    @hookimpl("advantage", name="reinforce_plus_plus")
    def returns(self, batch: Batch) -> Values:
        """Discounted returns of the reward at the end and the KL penalty at each token (arXiv:2501.03262)."""
        from miles_reinforce.advantage import token_returns

        return token_returns(batch, self.algorithm)

    @hookimpl("advantage", name="reinforce_plus_plus_baseline")
    def baseline(self, batch: Batch) -> Values:
        """Reward less the mean of its group, less the KL penalty at each token (arXiv:2501.03262)."""
        from miles_grpo.advantage import group_relative

        from miles_core.stages.advantage import penalised

        return penalised(batch, group_relative(batch, self.algorithm, divide=False), self.algorithm)

    @hookimpl("advantage", name="rloo")
    def leave_one_out(self, batch: Batch) -> Values:
        """Reward, KL included, less the mean reward of the group's other rollouts (arXiv:2402.14740)."""
        from miles_reinforce.advantage import leave_one_out

        return leave_one_out(batch, self.algorithm)
