"""The plugin. The loss is in loss.py, imported when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_core.config import RunConfig
from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    import torch

    from miles_core.stages.advantage import Values
    from miles_core.stages.loss import LossInputs, Metrics
    from miles_core.types import Batch


class Gspo:
    """Group sequence policy optimization: one ratio for each sequence (GSPO, arXiv:2507.18071)."""

    provides = ("compares:gspo", "needs-no-log-prob-pass")

    def __init__(self, config: RunConfig):
        self.algorithm = config.algorithm

    @hookimpl(name="gspo")
    def advantage(self, batch: Batch) -> Values:
        """(r - mean) / (std + 1e-6) over the rollouts of each group, less the KL penalty of each token if there is one.

        Source: arXiv:2507.18071, eq. 6.
        """
        from miles_grpo.advantage import group_relative

        from miles_core.stages.advantage import penalised

        return penalised(batch, group_relative(batch, self.algorithm), self.algorithm)

    @hookimpl(name="gspo")
    def policy_loss(self, inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
        """The clipped surrogate with the ratio of the sequence at each of its tokens."""
        from miles_gspo.loss import sequence_surrogate

        return sequence_surrogate(inputs)
