"""Per-token estimates of a KL divergence, for the loss, the reward and metrics alike."""

from __future__ import annotations

import torch


def approximate_kl(log_probs: torch.Tensor, base: torch.Tensor, kind: str,
                   ratio: torch.Tensor | None = None) -> torch.Tensor:
    """Estimates of KL(policy || base) from tokens drawn from the policy.

    With d = log_probs - base: k1 = d, k2 = d^2/2, k3 = exp(-d) - 1 + d (http://joschu.net/blog/kl-approx.html);
    low_var_kl is k3 with d clamped to [-20, 20] and the result to [-10, 10]. A NaN stays one, so that it is refused.

    Args:
        log_probs, base: [N].
        ratio: [N] policy / behaviour policy, by which the estimate is multiplied before the last clamp. The gradient of
            the product's mean is then that of the divergence (arXiv:2512.02556, "Unbiased KL Estimate").

    Returns:
        [N].
    """
    d = log_probs - base
    if kind == "low_var_kl":
        d = d.clamp(-20, 20)
    if kind == "k1":
        value = d
    elif kind == "k2":
        value = d.square() / 2
    elif kind in ("k3", "low_var_kl"):
        value = torch.expm1(-d) + d
    else:
        raise ValueError(f"unknown KL estimator {kind!r}")
    if ratio is not None:
        value = ratio * value
    return value.clamp(-10, 10) if kind == "low_var_kl" else value
