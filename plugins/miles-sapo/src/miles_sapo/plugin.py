"""The plugin. The loss is in loss.py, imported when first used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles_core.config import RunConfig, option
from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    import torch

    from miles_core.stages.advantage import Values
    from miles_core.stages.loss import LossInputs, Metrics
    from miles_core.types import Batch


@dataclass(frozen=True)
class SapoOptions:
    """The gate."""

    temperature_pos: float = option(1.0, "Temperature of tokens with an advantage above 0; a higher one fades their "
                                    "gradient sooner.", within=(0.01,), flags=("--sapo-temperature-pos",))
    temperature_neg: float = option(1.05, "Temperature of all other tokens.", within=(0.01,),
                                    flags=("--sapo-temperature-neg",))


class Sapo:
    """A soft gate in place of a clip: gradients fade with the distance to the old policy (SAPO, arXiv:2511.20347)."""

    provides = ("compares:sapo", "needs-no-log-prob-pass")

    def __init__(self, options: SapoOptions, config: RunConfig):
        self.options, self.algorithm = options, config.algorithm

    @hookimpl(name="sapo")
    def advantage(self, batch: Batch) -> Values:
        """(r - mean) / (std + 1e-6) over the rollouts of each group, less the KL penalty of each token if there is one.

        Source: arXiv:2511.20347, section 2.
        """
        from miles_grpo.advantage import group_relative

        from miles_core.stages.advantage import penalised

        return penalised(batch, group_relative(batch, self.algorithm), self.algorithm)

    @hookimpl(name="sapo")
    def policy_loss(self, inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
        """-4 / tau sigmoid(tau (ratio - 1)) A."""
        from miles_sapo.loss import gated_surrogate

        return gated_surrogate(inputs, self.options.temperature_pos, self.options.temperature_neg)
