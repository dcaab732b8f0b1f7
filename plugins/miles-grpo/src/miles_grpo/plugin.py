"""The plugin: options and hooks. The mathematics is in advantage.py and loss.py, imported when first used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles_core.config import option
from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    import torch

    from miles_core.stages.loss import LossInputs, Metrics
    from miles_core.types import Batch


@dataclass(frozen=True, kw_only=True)
class GrpoOptions:
    """How rewards become advantages; the clip band belongs to the core's [algorithm]."""

    rewards_normalization: bool = option(
        True, "Subtract the group's mean reward; off, the raw reward is the advantage.",
        off=("--disable-rewards-normalization",),
    )
    std_normalization: bool = option(
        True, "Divide by the group's standard deviation too; off is the Dr. GRPO estimator.",
        off=("--disable-grpo-std-normalization",),
    )


class Grpo:
    """Group-relative advantages and the clipped, optionally dual-clipped policy loss (arXiv:2402.03300)."""

    def __init__(self, options: GrpoOptions):
        self.options = options

    @hookimpl(name="grpo")
    def advantage(self, batch: Batch) -> Sequence[float]:
        """One number per sample: its rollout's reward relative to the other rollouts of the group."""
        from miles_grpo.advantage import group_relative

        return [
            value
            for group in batch.groups
            for value in group_relative(
                group, normalize=self.options.rewards_normalization, divide=self.options.std_normalization
            )
        ]

    @hookimpl(name="grpo")
    def policy_loss(self, inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
        """The clipped surrogate per token, with pg_clipfrac and ppo_kl."""
        from miles_grpo.loss import clipped_surrogate

        return clipped_surrogate(inputs)
