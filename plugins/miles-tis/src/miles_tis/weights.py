"""Weights and masks from the ratio of trainer to engine.

    r_t = exp(clamp(x_t, -20, 20)),    x_t = trainer's old log-prob - engine's log-prob of token t
    level sequence: x is the sum over the sample's trained tokens; geometric: their mean

TIS, truncated importance sampling (https://fengyao.notion.site/off-policy-rl), multiplies the policy loss by r,
bounded; IcePop (arXiv:2510.18855) leaves out tokens that are out of bounds; MIS, masked importance sampling, rejects on
a level of its own and vetoes whole samples. Everything is without gradient, and denominators stay what they are: a
rejected token counts as one whose loss is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from miles_core.stages.loss import TokenWeights, at_trained, bounded_exp, log_ratio, sample_mean, sample_sum
from miles_tis.mismatch import mismatch

if TYPE_CHECKING:
    from miles_core.stages.loss import LossInputs, Metrics
    from miles_core.types import Sample
    from miles_tis.plugin import TisOptions

SMALLEST_MEAN = 1e-8


def corrected(weights: TokenWeights, inputs: LossInputs, options: TisOptions, mean: float = 1.0) -> TokenWeights:
    """The weights and mask of N tokens, and the metrics of the gap.

    Args:
        weights: what stands so far; the correction is multiplied on it.
        mean: of the bounded weights over the whole optimizer step, where they are normalised.
    """
    with torch.no_grad():
        trainer = inputs.rows.get("log_probs", inputs.log_probs.detach())
        distance = at_trained(inputs, trainer - inputs.rollout_log_probs)
        metrics = mismatch(inputs, trainer, distance)
        weight, keep = torch.ones_like(distance), torch.ones_like(distance, dtype=torch.bool)
        if options.use_tis:
            weight, keep = _importance(inputs, distance, options, metrics)
            if options.tis_batch_normalize:
                weight = weight / mean
                metrics["mis_batch_norm_factor"] = torch.full_like(weight, mean)
        if options.use_rs:
            keep = keep & _accepted(inputs, distance, options, metrics)
        if options.rs_veto_threshold is not None:
            keep = keep & _not_vetoed(inputs, distance, options.rs_veto_threshold, metrics)
        if options.use_tis or options.use_rs:
            metrics["mis_is_ratio_mean_after_tis_rs"] = torch.where(keep, weight, 0)
        if options.use_opsm:
            keep = keep & _on_policy(inputs, options.opsm_delta, metrics)
        return TokenWeights(weights.weight * weight, weights.keep & keep, {**weights.metrics, **metrics})


def step_mean(samples: Sequence[Sample], options: TisOptions) -> float:
    """The mean of the bounded weights of an optimizer step, before any rejection; 1 where it is next to 0.

    Over tokens, or over samples where the level is the sequence. The columns are those of the whole step, so the mean
    does not depend on how it is cut.
    """
    distances = []
    for sample in samples:
        trained = torch.as_tensor(sample.columns["loss_mask"]) > 0
        if trained.any():
            trainer, engine = (torch.as_tensor(sample.columns[name], dtype=torch.float64)[trained]
                               for name in ("log_probs", "rollout_log_probs"))
            distance = trainer - engine
            distances.append(distance if options.tis_level == "token" else distance.sum(0, keepdim=True))
    mean = float(_bounded(bounded_exp(torch.cat(distances)), options).mean()) if distances else 1.0
    return mean if mean > SMALLEST_MEAN else 1.0


def at_level(inputs: LossInputs, distance: torch.Tensor, level: str) -> torch.Tensor:
    """[N] log-ratios of tokens -> [N] of the level, exact where a sample is cut over ranks."""
    if level == "token":
        return distance
    return (sample_sum if level == "sequence" else sample_mean)(inputs, distance)


def _bounded(ratio: torch.Tensor, options: TisOptions) -> torch.Tensor:
    if options.tis_mode == "mask":
        return ratio
    return ratio.clamp(0.0 if options.tis_mode == "truncate" else options.tis_clip_low, options.tis_clip)


def _importance(inputs: LossInputs, distance: torch.Tensor, options: TisOptions,
                metrics: Metrics) -> tuple[torch.Tensor, torch.Tensor]:
    ratio = bounded_exp(at_level(inputs, distance, options.tis_level))
    weight = _bounded(ratio, options)
    low, high = ratio < options.tis_clip_low, ratio > options.tis_clip
    if options.tis_mode == "truncate":
        low = torch.zeros_like(low)
    share = {"low": low.to(ratio.dtype), "high": high.to(ratio.dtype)}
    metrics |= {"tis": ratio, "tis_abs": (ratio - 1).abs(), "tis_clipfrac": share["low"] + share["high"],
                "ois": bounded_exp(log_ratio(inputs).detach()), "mis_tis_weight_before_bound": ratio,
                "mis_tis_weight_after_bound": weight}
    if options.tis_mode == "truncate":
        metrics["mis_tis_truncate_fraction"] = share["high"]
    else:
        metrics |= {f"mis_tis_{options.tis_mode}_fraction_{side}": value for side, value in share.items()}
    return weight, ~(low | high) if options.tis_mode == "mask" else torch.ones_like(low)


def _accepted(inputs: LossInputs, distance: torch.Tensor, options: TisOptions, metrics: Metrics) -> torch.Tensor:
    ratio = bounded_exp(at_level(inputs, distance, options.rs_level))
    low = ratio < (options.tis_clip_low if options.rs_lower_bound is None else options.rs_lower_bound)
    high = ratio > (options.tis_clip if options.rs_upper_bound is None else options.rs_upper_bound)
    metrics |= {"mis_rs_mask_fraction_low": low.to(ratio.dtype), "mis_rs_mask_fraction_high": high.to(ratio.dtype)}
    return ~(low | high)


def _not_vetoed(inputs: LossInputs, distance: torch.Tensor, threshold: float, metrics: Metrics) -> torch.Tensor:
    """Samples without a trained token whose ratio is below the threshold."""
    token = at_trained(inputs, (distance.exp() < threshold).to(distance.dtype))
    sequence = (sample_sum(inputs, token) > 0).to(distance.dtype)
    metrics |= {"mis_rs_catastrophic_token_fraction": token, "mis_rs_catastrophic_seq_fraction": sequence}
    return sequence == 0


def _on_policy(inputs: LossInputs, delta: float, metrics: Metrics) -> torch.Tensor:
    """OPSM, off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556): a mistake that the policy has unlearnt."""
    moved = -sample_mean(inputs, log_ratio(inputs).detach()) > delta
    left_out = (inputs.advantages < 0) & moved
    metrics["opsm_clipfrac"] = left_out.to(inputs.mask.dtype)
    return ~left_out
