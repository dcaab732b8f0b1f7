"""Distributions: whether two samples are of one and the same."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def kolmogorov_smirnov(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """The two-sample test of Kolmogorov and Smirnov.

    Args:
        one, other: of any lengths; the p-value is asymptotic, good from some dozens on and conservative with ties.

    Returns:
        The largest distance of the two empirical distribution functions, and the chance of one as large if both
        samples are of the same distribution: Q(sqrt(n m / (n + m)) D) with Q(x) = 2 sum_k (-1)^(k-1) exp(-2 k^2 x^2)
        (Smirnov 1948).
    """
    first, second = np.sort(np.asarray(one, float)), np.sort(np.asarray(other, float))
    both = np.concatenate([first, second])
    below = [np.searchsorted(part, both, side="right") / len(part) for part in (first, second)]
    distance = float(np.abs(below[0] - below[1]).max())
    x = distance * math.sqrt(len(first) * len(second) / (len(first) + len(second)))
    if x < 0.2:  # Q is 1 to twelve digits, and the series converges slowly
        return distance, 1.0
    chance = 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * x) ** 2) for k in range(1, 101))
    return distance, min(1.0, max(0.0, chance))
