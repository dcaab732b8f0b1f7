"""How far trainer and engine are apart, as metrics of Miles's names, averaged by the run's reduction.

A number of a sample stands at each of its tokens, so that the mean over rollouts is that over samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from miles_core.stages.loss import at_trained, bounded_exp, sample_mean, sample_sum

if TYPE_CHECKING:
    from miles_core.stages.loss import LossInputs, Metrics


def mismatch(inputs: LossInputs, trainer: torch.Tensor, distance: torch.Tensor) -> Metrics:
    """[N] values by name.

    Args:
        trainer: [N] log-probs that the trainer gave the tokens before the step.
        distance: [N] trainer's less engine's, 0 where the mask is 0.
    """
    trained_mean = sample_mean(inputs, at_trained(inputs, trainer))
    engine_mean = sample_mean(inputs, at_trained(inputs, inputs.rollout_log_probs))
    gap = engine_mean - trained_mean
    return {
        "mis_training_log_ppl": -trained_mean,
        "mis_training_ppl": bounded_exp(-trained_mean),
        "mis_rollout_log_ppl": -engine_mean,
        "mis_rollout_ppl": bounded_exp(-engine_mean),
        "mis_log_ppl_diff": gap,
        "mis_log_ppl_abs_diff": gap.abs(),
        "mis_ppl_ratio": bounded_exp(gap),
        "mis_kl": -distance,
        "mis_k3_kl": bounded_exp(distance) - distance - 1,
        "mis_chi2_token": bounded_exp(distance).square() - 1,
        "mis_chi2_seq": bounded_exp(sample_sum(inputs, distance)).square() - 1,
    }
