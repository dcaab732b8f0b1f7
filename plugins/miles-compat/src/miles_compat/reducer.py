"""A reducer of Miles as weights of tokens.

Miles's reducer maps the losses of all tokens to a number. One that is linear is a weighted sum, and its weights are its
gradient: they are read off it once per optimizer step, and checked at a second point. Miles divides what a reducer
returns by the number of rollouts of the step, or with calculate_per_token_loss by the number of trained tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from miles_core.errors import HookError
from miles_core.stages.loss import per_constant
from miles_core.stages.loss import per_token as weight_per_token
from miles_core.types import Sample

WHO = "custom_pg_loss_reducer_function_path"
TOLERANCE = 1e-5
"""Of a reducer that works in float32, relative to the largest weight."""


def token_weights(factory: Callable[..., Any], samples: Sequence[Sample], *, per_token: bool) -> np.ndarray:
    """[samples] weight of one trained token of each.

    Args:
        factory: (total_lengths, response_lengths, loss_masks, calculate_per_token_loss) -> (tensor [tokens] -> number).
        samples: all of the optimizer step; the factory is called once, with all of them.
        per_token: calculate_per_token_loss.

    Raises:
        HookError: the reducer is not linear, counts masked tokens, or weighs the tokens of a sample differently.
    """
    if not samples:
        return np.zeros(0)
    masks = [torch.as_tensor(sample.columns["loss_mask"], dtype=torch.float32) for sample in samples]
    lengths = [sample.response_length for sample in samples]
    reducer = factory([sample.length for sample in samples], lengths, masks, per_token)
    if not callable(reducer):
        raise HookError("the function should return a reducer", code="reducer-function-return", got=repr(reducer)[:100],
                        who=WHO, fix="return a callable that maps the losses of all tokens to a number")
    weights = _slopes(reducer, sum(lengths))
    found = []
    for sample, mask, part in zip(samples, masks, weights.split(lengths), strict=True):
        trained = part[mask > 0]
        if part[mask == 0].any():
            raise HookError(f"the reducer counts tokens of {sample.name} that are masked", who=WHO,
                            got=f"{int(part[mask == 0].count_nonzero())} of them", code="reducer-counts-masked",
                            fix="multiply by the loss mask")
        if len(trained) and float(trained.max() - trained.min()) > TOLERANCE * float(weights.abs().max()):
            raise HookError(f"the reducer weighs the tokens of {sample.name} differently", who=WHO,
                            got=f"{float(trained.min()):g} to {float(trained.max()):g}", code="reducer-weighs-tokens",
                            fix="weigh tokens in the hook token_weights")
        found.append(float(trained.mean()) if len(trained) else 0.0)
    share = weight_per_token(samples) if per_token else per_constant(samples, 1.0)
    weights_of: np.ndarray = np.array(found) * share
    return weights_of


def _slopes(reducer: Callable[[torch.Tensor], torch.Tensor], size: int) -> torch.Tensor:
    """[size] float64 gradient of a linear reducer."""
    points = torch.ones(size, dtype=torch.float64), torch.linspace(-1.0, 2.0, size, dtype=torch.float64)
    found = []
    for point in points:
        leaf = point.clone().requires_grad_()
        value = reducer(leaf)
        if not (isinstance(value, torch.Tensor) and value.numel() == 1 and value.requires_grad):
            raise HookError("the reducer should map tokens' losses to one number, by operations of torch",
                            code="reducer-not-a-number", who=WHO, got=repr(value)[:100],
                            fix="return a sum, without item() and detach()")
        slope, = torch.autograd.grad(value.sum(), leaf)
        found.append((slope, float(value.detach())))
    (slope, _), (other, given) = found
    scale = max(float(slope.abs().max()), 1e-30)
    straight = float(other.sub(slope).abs().max()) <= TOLERANCE * scale
    expected = float(slope @ points[1])
    if not straight or abs(value - expected) > TOLERANCE * scale * size:
        raise HookError("the reducer is not linear", code="reducer-not-linear", who=WHO,
                        got=f"{value:g} in place of {expected:g}",
                        fix="return a weighted sum of the tokens' losses; for more write the hook policy_loss")
    return slope
