"""The clipped surrogate per token: PPO (arXiv:1707.06347, eq. 7) with three refinements.

    ratio = exp(clamp(log_prob - old_log_prob, -20, 20))
    loss  = max(-ratio A, -clip(ratio, 1 - eps_clip, 1 + eps_clip_high) A)
    loss  = min(-eps_clip_c A, loss)    where A < 0 and a dual-clip constant is given

An asymmetric band is DAPO's clip-higher (arXiv:2503.14476, eq. 10); the dual clip bounds what a token with a negative
advantage and a large ratio can do (arXiv:1912.09729, eq. 5). KL and entropy are terms of their own, added by the core,
and only the core reduces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from miles_core.errors import ConfigError

if TYPE_CHECKING:
    from miles_core.stages.loss import LossInputs, Metrics

LOG_RATIO_BOUND = 20.0


def clipped_surrogate(inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
    """The policy loss of N tokens.

    Rows whose mask is 0 are 0 and have no gradient, whatever they hold; a NaN on a trained row stays one, so that the
    step is refused instead of going on without that token.

    Returns:
        [N] loss with gradient to `inputs.log_probs`, and per-token metrics without: pg_clipfrac (1 where the clipped
        branch holds) and ppo_kl (old_log_prob - log_prob).

    Raises:
        ConfigError: a dual-clip constant of 1 or less.
    """
    if inputs.eps_clip_c is not None and not inputs.eps_clip_c > 1:
        raise ConfigError("the dual-clip constant should be above 1", got=inputs.eps_clip_c, who="algorithm.eps_clip_c",
                          fix="--eps-clip-c 3, or leave it out")
    active = inputs.mask > 0
    zero = torch.zeros_like(inputs.log_probs)
    kl = torch.where(active, inputs.old_log_probs - inputs.log_probs, zero)
    advantages = torch.where(active, inputs.advantages, zero)

    ratio = torch.exp((-kl).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - inputs.eps_clip, 1 + inputs.eps_clip_high) * advantages
    loss = torch.maximum(plain, clipped)
    if inputs.eps_clip_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(-inputs.eps_clip_c * advantages, loss), loss)
    return loss, {"pg_clipfrac": (clipped > plain).to(loss.dtype), "ppo_kl": kl.detach()}
