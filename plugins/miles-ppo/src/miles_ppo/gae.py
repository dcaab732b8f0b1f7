"""Generalised advantage estimation (arXiv:1506.02438) over the trained tokens of each sample.

    delta_t = u_t + gamma V_{t+1} - V_t            V = 0 after the last trained token
    A_t     = delta_t + gamma lambda A_{t+1}       eq. 16
    G_t     = A_t + V_t                            what the critic learns

u_t is the KL penalty of token t, and the sample's reward on top at the last trained token. Tokens that are not trained
on (what a tool wrote) are left out before any of it: the discount counts trained tokens only, and nothing that an
untrained row holds can matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from miles_core.stages.advantage import token_rewards

if TYPE_CHECKING:
    from miles_core.config.tables import Algorithm
    from miles_core.types import Batch

CHUNK = 128
"""Tokens whose advantages are one row of a matrix product."""

Estimate = Callable[[np.ndarray, np.ndarray, float, float], np.ndarray]
"""(rewards [K], values [K], gamma, lambda) -> advantages [K], all float64."""


def vanilla_gae(rewards: np.ndarray, values: np.ndarray, gamma: float, lambd: float) -> np.ndarray:
    """The recursion, token by token from the end."""
    deltas = _deltas(rewards, values, gamma)
    advantages, following = np.empty_like(deltas), 0.0
    for t in range(len(deltas) - 1, -1, -1):
        advantages[t] = following = deltas[t] + gamma * lambd * following
    return advantages


def chunked_gae(rewards: np.ndarray, values: np.ndarray, gamma: float, lambd: float) -> np.ndarray:
    """The same in chunks of n = 128 tokens: within a chunk a matrix product, between chunks one carried number.

        A_i = sum_{j >= i} w^(j-i) delta_j + w^(n-i) A_next        w = gamma lambda

    A_next is the first advantage of the chunk after it. No power of w is above 1, and none is divided by.
    """
    size = len(rewards)
    deltas = np.zeros((-(-size // CHUNK), CHUNK))
    deltas.reshape(-1)[:size] = _deltas(rewards, values, gamma)
    powers = (gamma * lambd) ** np.arange(CHUNK + 1)
    apart = np.arange(CHUNK) - np.arange(CHUNK)[:, None]
    advantages = deltas @ np.where(apart >= 0, powers[np.abs(apart)], 0.0).T
    carry = powers[CHUNK - np.arange(CHUNK)]
    for chunk in range(len(advantages) - 2, -1, -1):
        advantages[chunk] += carry * advantages[chunk + 1, 0]
    return advantages.reshape(-1)[:size]


ESTIMATORS: Mapping[str, Estimate] = MappingProxyType({"vanilla": vanilla_gae, "chunked": chunked_gae})


def advantages_and_returns(batch: Batch, algorithm: Algorithm, estimate: Estimate) -> list[np.ndarray]:
    """Each sample's advantages, [R] float64, 0 where it is not trained on; its column `returns` is filled.

    A sample without a trained token has advantages of 0, and its reward goes to no token. A truncated answer ends like
    any other: what might have followed counts as 0.

    Raises:
        TrainError, RewardError: see `stages.advantage.rollout_rewards`.
    """
    per_sample = []
    for sample, rewards in zip(batch.samples, token_rewards(batch, algorithm), strict=True):
        trained = np.flatnonzero(sample.columns["loss_mask"])
        values = sample.columns["values"][trained].astype(np.float64)
        advantages, returns = np.zeros(sample.response_length), np.zeros(sample.response_length, np.float32)
        advantages[trained] = estimate(rewards[trained], values, algorithm.gamma, algorithm.lambd)
        returns[trained] = advantages[trained] + values
        sample.columns["returns"] = returns
        per_sample.append(advantages)
    return per_sample


def _deltas(rewards: np.ndarray, values: np.ndarray, gamma: float) -> np.ndarray:
    deltas: np.ndarray = rewards + gamma * np.append(values[1:], 0.0)[: len(values)] - values
    return deltas
