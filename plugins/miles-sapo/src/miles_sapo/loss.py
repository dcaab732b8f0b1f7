"""A policy gradient behind a soft gate: SAPO (arXiv:2511.20347, eq. 5 and 6).

    ratio = exp(clamp(log_prob - old_log_prob, -20, 20))
    gate  = 4 / tau x sigmoid(tau (ratio - 1))         tau: of positive advantages, or of all others
    loss  = -gate A

At ratio 1 the gradient is the policy gradient's. Away from it it fades, where a clip cuts it off, and faster at a
higher tau.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from miles_core.stages.loss import at_trained, bounded_exp, log_ratio

if TYPE_CHECKING:
    from miles_core.stages.loss import LossInputs, Metrics


def gated_surrogate(inputs: LossInputs, positive: float, negative: float) -> tuple[torch.Tensor, Metrics]:
    """The policy loss of N tokens, and sapo_gate (the gate's slope: 1 at ratio 1, towards 0 far from it) and ppo_kl.

    Args:
        positive, negative: tau of tokens with an advantage above 0, and of all others.

    Returns:
        [N] loss with gradient to `inputs.log_probs`; per-token metrics without.
    """
    distance, advantages = log_ratio(inputs), at_trained(inputs, inputs.advantages)
    tau = torch.where(advantages > 0, advantages.new_tensor(positive), advantages.new_tensor(negative))
    share = torch.sigmoid(tau * (bounded_exp(distance) - 1))
    slope = (4 * share * (1 - share)).detach()
    return -4 / tau * share * advantages, {"sapo_gate": slope, "ppo_kl": -distance.detach()}
