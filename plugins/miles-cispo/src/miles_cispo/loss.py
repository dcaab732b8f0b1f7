"""A policy gradient with clipped importance weights: CISPO (arXiv:2506.13585, eq. 4 and 5).

    ratio = exp(clamp(log_prob - old_log_prob, -20, 20))
    loss  = -sg(clip(ratio, 1 - eps_clip, 1 + eps_clip_high)) A log_prob        sg: without gradient

A clipped surrogate gives a token outside the band no gradient; here it keeps one, with a bounded weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from miles_core.stages.loss import at_trained, bounded_exp, clip, log_ratio

if TYPE_CHECKING:
    from miles_core.stages.loss import LossInputs, Metrics


def weighted_log_likelihood(inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
    """The policy loss of N tokens, and pg_clipfrac (1 where the ratio lies outside the band) and ppo_kl.

    Returns:
        [N] loss with gradient to `inputs.log_probs`; per-token metrics without.
    """
    distance = log_ratio(inputs).detach()
    ratio = bounded_exp(distance)
    weight = clip(ratio, inputs)
    loss = -weight * at_trained(inputs, inputs.advantages) * at_trained(inputs, inputs.log_probs)
    return loss, {"pg_clipfrac": (weight != ratio).to(loss.dtype), "ppo_kl": -distance}
