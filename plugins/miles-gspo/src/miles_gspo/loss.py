"""The clipped surrogate of a whole sequence: GSPO (arXiv:2507.18071, eq. 5 and 7).

    s = exp(mean over the sequence's trained tokens of (log_prob - old_log_prob))
    loss at each of its tokens = max(-s A, -clip(s, 1 - eps_clip, 1 + eps_clip_high) A)

The mean over a sequence's tokens, which the core's reduction takes, is then the paper's loss of that sequence. A
dual-clip constant acts as in the clipped surrogate of single tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from miles_core.stages.loss import at_trained, clipped_surrogate, log_ratio, sample_mean

if TYPE_CHECKING:
    from miles_core.stages.loss import LossInputs, Metrics


def sequence_surrogate(inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
    """The policy loss of N tokens, and pg_clipfrac and ppo_kl of their sequences.

    The gradient reaches every trained token of a sequence through its ratio, also where the sequence is cut over ranks.

    Returns:
        [N] loss with gradient to `inputs.log_probs`; per-token metrics without.
    """
    mean = sample_mean(inputs, log_ratio(inputs))
    return clipped_surrogate(inputs, at_trained(inputs, mean))
