"""What the critic descends, and how well it predicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from miles_core.stages.loss import at_trained

if TYPE_CHECKING:
    from miles_core.stages.loss import LossInputs, Metrics
    from miles_core.types import Sample


def clipped_value_loss(inputs: LossInputs, clip: float) -> tuple[torch.Tensor, Metrics]:
    """The value loss of N tokens, the worse of two squared errors:

        L = max((V_old + clamp(V - V_old, -clip, clip) - G)^2, (V - G)^2)

    A value that has moved further than `clip` towards its return has no gradient any more; one that moved away from it
    keeps it. No source of its own: PPO's reference implementation has it beside the policy's clip (openai/baselines,
    ppo2), with a factor 1/2 that Miles leaves out.

    Args:
        inputs: with `values` of the critic, and the columns `values` (V_old) and `returns` (G) among its rows.

    Returns:
        [N] loss with gradient to `inputs.values`, 0 where the mask is 0; per-token metrics without: value_loss and
        value_clipfrac (1 where the clipped error is the larger one).
    """
    old, returns = inputs.rows["values"], inputs.rows["returns"]
    values = cast("torch.Tensor", inputs.values)  # of a model with the head "value"
    plain = at_trained(inputs, values - returns).square()
    moved = at_trained(inputs, values - old).clamp(-clip, clip)
    clipped = (at_trained(inputs, old - returns) + moved).square()
    loss = torch.maximum(clipped, plain)
    # In float the two differ by rounding where nothing is clipped.
    bound = at_trained(inputs, values - old).abs() > clip
    return loss, {"value_loss": loss.detach(), "value_clipfrac": (bound & (clipped > plain)).to(loss.dtype)}


def trained(samples: Sequence[Sample], column: str) -> np.ndarray:
    """A column at all trained tokens of the samples, float64."""
    rows = [sample.columns[column][sample.columns["loss_mask"] > 0] for sample in samples if column in sample.columns]
    return np.concatenate([np.zeros(0), *rows])


def return_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """rollout/returns, and rollout/explained_variance = 1 - Var(G - V) / Var(G) of the values before the first step.

    1 is a perfect critic, 0 one that knows the mean alone, and below 0 it does harm. Returns that are all equal leave
    nothing to explain, and the number out.
    """
    returns, values = trained(samples, "returns"), trained(samples, "values")
    if not returns.size:
        return {}
    metrics = {"rollout/returns": float(returns.mean())}
    if (spread := returns.var()) > 0:
        metrics["rollout/explained_variance"] = float(1 - (returns - values).var() / spread)
    return metrics
