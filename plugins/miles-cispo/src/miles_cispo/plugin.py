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


class Cispo:
    """Clipped importance weights in place of clipped updates: no token loses its gradient (CISPO, arXiv:2506.13585)."""

    provides = ("compares:cispo", "needs-no-log-prob-pass")

    def __init__(self, config: RunConfig):
        self.algorithm = config.algorithm

    @hookimpl(name="cispo")
    def advantage(self, batch: Batch) -> Values:
        """(r - mean) / (std + 1e-6) over the rollouts of each group, less the KL penalty of each token if there is one.

        Source: arXiv:2506.13585, section 3.1.
        """
        from miles_grpo.advantage import group_relative

        from miles_core.stages.advantage import penalised

        return penalised(batch, group_relative(batch, self.algorithm), self.algorithm)

    @hookimpl(name="cispo")
    def policy_loss(self, inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
        """-clip(ratio) A log_prob, the clipped ratio without gradient."""
        from miles_cispo.loss import weighted_log_likelihood

        return weighted_log_likelihood(inputs)
