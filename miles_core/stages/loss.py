"""Stage 7, loss: per-token terms in, one scalar out. Only this module divides.

A policy loss and the further loss terms return one value per token and never reduce. Denominators are fixed from the
whole optimizer step before anything is masked or rejected; numerators are local, denominators global. The gradient is
therefore the same under any micro-batching, packing order, padding, data or context parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from miles_core.types import Sample

Metrics = dict[str, torch.Tensor]
"""Name -> [N] per-token values; the core averages them with the run's reduction."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What a loss may look at; N prediction rows of one micro-batch, prompt and padding rows already left out.

    Args:
        log_probs: [N] of the policy being trained, temperature-scaled, with gradient.
        entropy: [N] of the same distribution; has a gradient only when the entropy coefficient is not 0. None when
            nobody asked for it.
        old_log_probs: [N] denominator of the ratio (recomputed, the engine's, or log_probs detached).
        rollout_log_probs: [N] as the engine reported them.
        ref_log_probs: [N] of the reference model, or None.
        advantages: [N].
        mask: [N] float, 1 where the token is trained on.
        sample: [N] int64, index of the sample within the micro-batch that each row belongs to.
        segment_sum: [N, ...] -> [samples, ...], sums over the rows of each sample, exact under context parallelism.
        eps_clip, eps_clip_high, eps_clip_c: lower and upper width of the clip band, dual-clip constant or None.
        rows: further columns on the same N rows, by name.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None
    old_log_probs: torch.Tensor
    rollout_log_probs: torch.Tensor
    ref_log_probs: torch.Tensor | None
    advantages: torch.Tensor
    mask: torch.Tensor
    sample: torch.Tensor
    segment_sum: Callable[[torch.Tensor], torch.Tensor]
    eps_clip: float
    eps_clip_high: float
    eps_clip_c: float | None
    rows: dict[str, torch.Tensor]


PolicyLoss = Callable[[LossInputs], tuple[torch.Tensor, Metrics]]
LossTerms = Callable[[LossInputs], dict[str, tuple[float, torch.Tensor]]]
"""Name -> (coefficient, [N] term). A coefficient of 0 makes the term a monitor without gradient."""

Reduction = Callable[[Sequence[Sample]], np.ndarray]
"""All samples of an optimizer step -> [samples] float64 weight of one token of each; fixed before any rejection."""


def per_sample(samples: Sequence[Sample]) -> np.ndarray:
    """mean over rollouts of (sum over tokens / number of trained tokens): the default.

    Samples of one rollout share one denominator, the sum of their masks (GRPO, arXiv:2402.03300, eq. 3).
    """
    keys = _rollouts(samples)
    tokens: dict[object, int] = {}
    for key, sample in zip(keys, samples, strict=True):
        tokens[key] = tokens.get(key, 0) + int(sample.columns["loss_mask"].sum())
    return np.array([1.0 / (max(tokens[key], 1) * len(tokens)) for key in keys])


def per_token(samples: Sequence[Sample]) -> np.ndarray:
    """sum over all tokens / number of trained tokens (--calculate-per-token-loss; DAPO, arXiv:2503.14476, eq. 8)."""
    total = sum(int(s.columns["loss_mask"].sum()) for s in samples)
    return np.full(len(samples), 1.0 / max(total, 1))


def _rollouts(samples: Sequence[Sample]) -> list[object]:
    """A rollout is not a sample: siblings carry one number, every other sample stands for itself."""
    return [
        ("sibling", s.prompt.stream, s.prompt.uid, s.rollout) if s.rollout is not None else ("own", i)
        for i, s in enumerate(samples)
    ]


def reduce(values: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The weighted sum of per-token values: this micro-batch's share of the step's loss.

    Args:
        values: [N]; weights: [N] of the run's reduction; mask: [N].

    Masked rows cannot leak: a NaN times 0 is a NaN, so they are selected away rather than multiplied.
    """
    return (torch.where(mask > 0, values, torch.zeros_like(values)) * weights).sum()


def approximate_kl(log_probs: torch.Tensor, base: torch.Tensor, kind: str) -> torch.Tensor:
    """Per-token estimates of KL(policy || base) from tokens drawn from the policy.

    With d = log_probs - base: k1 = d, k2 = d^2/2, k3 = exp(-d) - 1 + d (http://joschu.net/blog/kl-approx.html);
    low_var_kl is k3 with d clamped to [-20, 20] and the result to [-10, 10].
    """
    d = log_probs - base
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    if kind == "k3":
        return torch.expm1(-d) + d
    if kind == "low_var_kl":
        d = torch.nan_to_num(d).clamp(-20, 20)
        return (torch.expm1(-d) + d).clamp(-10, 10)
    raise ValueError(f"unknown KL estimator {kind!r}")
