"""Stage 7, loss: per-token terms in, one scalar out. Only this module divides.

A policy loss and the further loss terms return one value per token and never reduce. Denominators are fixed from the
whole optimizer step before anything is masked or rejected; numerators are local, denominators global. The gradient is
therefore the same under any micro-batching, packing order, padding, data or context parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from miles_core.errors import ConfigError
from miles_core.types import Sample

LOG_RATIO_BOUND = 20.0

Metrics = dict[str, torch.Tensor]
"""Name -> [N] per-token values; the core averages them with the run's reduction."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What a loss may look at; N prediction rows of one micro-batch, prompt and padding rows already left out.

    Args:
        log_probs: [N] of the policy being trained, temperature-scaled, with gradient.
        entropy: [N] of the same distribution; None without `observe_training_entropy` or an entropy coefficient, which
            gives it a gradient.
        old_log_probs: [N] denominator of the ratio (recomputed, the engine's, or log_probs detached).
        rollout_log_probs: [N] as the engine reported them.
        ref_log_probs: [N] of the reference model, or None.
        advantages: [N].
        mask: [N] float, 1 where the token is trained on.
        sample: [N] int64, index of the sample within the micro-batch that each row belongs to.
        segment_sum: [N, ...] -> [samples, ...], sums over the rows of each sample, exact under context parallelism.
        eps_clip, eps_clip_high, eps_clip_c: lower and upper width of the clip band, dual-clip constant or None.
        rows: further columns on the same N rows, by name.
        values: [N] of a model with a value head, with gradient; log_probs then are the column's, without.
        samples: which sample each entry of `segment_sum` is.
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
    values: torch.Tensor | None = None
    samples: Sequence[Sample] = ()


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """What multiplies the policy loss of each of N tokens, and which tokens are left out of its numerator.

    Args:
        weight: [N] without gradient.
        keep: [N] bool.
        metrics: [N] values by name; averaged like the losses.
    """

    weight: torch.Tensor
    keep: torch.Tensor
    metrics: Metrics


PolicyLoss = Callable[[LossInputs], tuple[torch.Tensor, Metrics]]


def per_sample(samples: Sequence[Sample]) -> np.ndarray:
    """mean over rollouts of (sum over tokens / number of trained tokens): the default.

    Samples of one rollout share one denominator, the sum of their masks (GRPO, arXiv:2402.03300, eq. 3).
    """
    keys = rollouts_of(samples)
    tokens: dict[object, int] = {}
    for key, sample in zip(keys, samples, strict=True):
        tokens[key] = tokens.get(key, 0) + int(sample.columns["loss_mask"].sum())
    return np.array([1.0 / (max(tokens[key], 1) * len(tokens)) for key in keys])


def per_token(samples: Sequence[Sample]) -> np.ndarray:
    """sum over all tokens / number of trained tokens (--calculate-per-token-loss; DAPO, arXiv:2503.14476, eq. 8)."""
    return np.full(len(samples), 1.0 / max(sum(int(s.columns["loss_mask"].sum()) for s in samples), 1))


def per_constant(samples: Sequence[Sample], constant: float) -> np.ndarray:
    """sum over all tokens / (number of rollouts x constant): a token counts the same in short and long answers.

    Dr. GRPO, arXiv:2503.20783, section 3.2.
    """
    return np.full(len(samples), 1.0 / (max(len(set(rollouts_of(samples))), 1) * constant))


def rollouts_of(samples: Sequence[Sample]) -> list[Hashable]:
    """Which rollout each sample belongs to: siblings carry one number, every other sample stands for itself."""
    return [("sibling", s.prompt.stream, s.prompt.uid, s.rollout) if s.rollout is not None else ("own", i)
            for i, s in enumerate(samples)]


def reduce(values: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The weighted sum of per-token values: this micro-batch's share of the step's loss.

    Args:
        values: [N]; weights: [N] of the run's reduction; mask: [N].

    Masked rows cannot leak: a NaN times 0 is a NaN, so they are selected away rather than multiplied.
    """
    return (torch.where(mask > 0, values, torch.zeros_like(values)) * weights).sum()


def log_ratio(inputs: LossInputs) -> torch.Tensor:
    """log_probs - old_log_probs [N] with gradient; 0 where the mask is 0, whatever those rows hold."""
    return at_trained(inputs, inputs.log_probs - inputs.old_log_probs)


def at_trained(inputs: LossInputs, values: torch.Tensor) -> torch.Tensor:
    """[N] values, 0 and without gradient where the mask is 0: selected, for a NaN times 0 is a NaN."""
    return torch.where(inputs.mask > 0, values, torch.zeros_like(values))


def bounded_exp(values: torch.Tensor) -> torch.Tensor:
    """exp of a log-ratio clamped to [-20, 20], beyond which it has no gradient."""
    return values.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def sample_sum(inputs: LossInputs, values: torch.Tensor) -> torch.Tensor:
    """[N] values that are 0 at masked rows -> [N]: at each row the sum over its whole sample.

    Exact where a sample is cut over ranks, and so is its gradient. Every rank has to call it equally often.
    """
    return inputs.segment_sum(values)[inputs.sample]


def sample_mean(inputs: LossInputs, values: torch.Tensor) -> torch.Tensor:
    """[N] values that are 0 at masked rows -> [N]: at each row the mean over its sample's trained tokens."""
    return sample_sum(inputs, values) / sample_sum(inputs, inputs.mask).clamp(min=1)


def clip(ratio: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """[N] ratios, clamped to the run's band [1 - eps_clip, 1 + eps_clip_high]."""
    return ratio.clamp(1 - inputs.eps_clip, 1 + inputs.eps_clip_high)


def clipped_surrogate(inputs: LossInputs, log_ratios: torch.Tensor | None = None) -> tuple[torch.Tensor, Metrics]:
    """The clipped policy loss of N tokens: PPO (arXiv:1707.06347, eq. 7) with three refinements.

        ratio = exp(clamp(log_prob - old_log_prob, -20, 20))
        loss  = max(-ratio A, -clip(ratio, 1 - eps_clip, 1 + eps_clip_high) A)
        loss  = min(-eps_clip_c A, loss)    where A < 0 and a dual-clip constant is given

    An asymmetric band is DAPO's clip-higher (arXiv:2503.14476, eq. 10); the dual clip bounds what a token with a
    negative advantage and a large ratio can do (arXiv:1912.09729, eq. 5). A NaN on a trained row stays one, so that the
    step is refused instead of going on without that token.

    Args:
        log_ratios: [N] to take in place of `log_ratio(inputs)`, for instance one for each sequence.

    Returns:
        [N] loss with gradient to `inputs.log_probs`, and per-token metrics without: pg_clipfrac (1 where the clipped
        branch holds) and ppo_kl (the log-ratio, negated).

    Raises:
        ConfigError: a dual-clip constant of 1 or less.
    """
    if inputs.eps_clip_c is not None and not inputs.eps_clip_c > 1:
        raise ConfigError("the dual-clip constant should be above 1", code="dual-clip-out-of-range",
                          got=inputs.eps_clip_c, who="algorithm.eps_clip_c", fix="use --eps-clip-c 3, or remove it")
    log_ratios = log_ratio(inputs) if log_ratios is None else log_ratios
    advantages = at_trained(inputs, inputs.advantages)
    ratio = bounded_exp(log_ratios)
    plain, clipped = -ratio * advantages, -clip(ratio, inputs) * advantages
    loss = torch.maximum(plain, clipped)
    if inputs.eps_clip_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(-inputs.eps_clip_c * advantages, loss), loss)
    return loss, {"pg_clipfrac": (clipped > plain).to(loss.dtype), "ppo_kl": -log_ratios.detach()}
