"""Stage 6, advantage: rewards (and whatever columns) of a whole rollout become one advantage per response token.

What estimators share is here: the reward of each rollout of a group, the KL penalty per token, and whitening. A rollout
is not a sample: siblings, the samples that one execution produced, carry one number in `Sample.rollout`, share one
reward, count once and all receive their rollout's advantage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Sized

import numpy as np

from miles_core.columns import trained
from miles_core.config.tables import Algorithm
from miles_core.errors import RewardError, TrainError
from miles_core.types import LARGEST_REWARD, Batch, Group, Sample, rollout_keys

DDOF = 1
WHITEN_EPSILON = 1e-8

Values = Sequence[float | np.ndarray]
"""What an estimator answers: a number or an [R] array for each of `batch.samples`."""


def fill(batch: Batch, values: Values, estimator: str) -> dict[str, float]:
    """Write the column `advantages` from an estimator's answer: a number or [R] array per sample.

    Raises:
        TrainError: wrong count, wrong length or not finite; names estimator and sample.
    """
    samples = batch.samples
    count = type(values).__name__ if isinstance(values, Mapping) or not isinstance(values, Sized) else len(values)
    if count != len(samples):
        raise TrainError(f"advantage estimator {estimator!r} returned {count} values for {len(samples)} samples",
                         code="advantages-count",
                         fix="return one number or [R] array for each of batch.samples, in order")
    for sample, value in zip(samples, values, strict=True):
        array = np.asarray(value, np.float32)
        if array.ndim == 0:
            array = np.full(sample.response_length, array, np.float32)
        sample.columns["advantages"] = array
    check(batch, f"advantage estimator {estimator!r}", fix="look at the rewards of its group")
    rows = trained(samples, "advantages")
    return {"rollout/advantages": float(rows.mean()) if rows.size else 0.0}


def check(batch: Batch, who: str, fix: str = "return one finite number for each response token") -> None:
    """Refuse a column `advantages` that is missing, not [R] or not finite: after the estimator and each further change.

    Raises:
        TrainError: names the sample and `who` did it.
    """
    for sample in batch.samples:
        array = np.asarray(sample.columns.get("advantages", np.nan))
        if array.shape != (sample.response_length,) or not np.isfinite(array).all():
            raise TrainError(f"{who} did not return [R] finite numbers for {sample.name}", code="advantages-not-finite",
                             got=f"shape {list(array.shape)} for R = {sample.response_length}", fix=fix)


def whiten(batch: Batch) -> None:
    """(A - mean) / sqrt(var + 1e-8) over all trained tokens of the rollout, var with n - 1; in place.

    The batch is whole on every rank, and so are the statistics (float64). Rows that are not trained on get the same
    map, as nobody looks at them. (--normalize-advantages)
    """
    values = trained(batch.samples, "advantages").astype(np.float64)
    if not values.size:
        return
    mean, var = values.mean(), values.var(ddof=DDOF) if values.size > DDOF else 0.0
    scale = 1.0 / math.sqrt(var + WHITEN_EPSILON)
    for sample in batch.samples:
        sample.columns["advantages"] = ((sample.columns["advantages"] - mean) * scale).astype(np.float32)


def rollout_rewards(group: Group) -> dict[object, float]:
    """The reward of each rollout of a group, by its key (`rollout_keys`).

    Raises:
        TrainError: a sample that was aborted, failed or never finished.
        RewardError: a missing or non-finite reward.
    """
    return dict(zip(rollout_keys(group), map(_trainable_reward, group.samples), strict=True))


def to_samples(group: Group, by_rollout: dict[object, float]) -> list[float]:
    """Numbers of rollouts, given to each of their samples, in the order of `group.samples`."""
    return [by_rollout[key] for key in rollout_keys(group)]


def kl_penalties(batch: Batch, algorithm: Algorithm) -> list[np.ndarray]:
    """-kl_coef x KL(policy || reference) at each response token, [R] float64 per sample; 0 where it is not trained on.

    The estimate is that of `kl_loss_type`; the policy is the one whose log-probs are the denominators of the ratio.
    """
    if not algorithm.kl_coef:
        return [np.zeros(sample.response_length) for sample in batch.samples]
    import torch

    from miles_core.kl import approximate_kl

    column, penalties = "rollout_log_probs" if algorithm.use_rollout_logprobs else "log_probs", []
    for sample in batch.samples:
        policy, reference = (torch.as_tensor(sample.columns[name], dtype=torch.float64)
                             for name in (column, "ref_log_probs"))
        divergence = approximate_kl(policy, reference, algorithm.kl_loss_type).numpy()
        penalties.append(np.where(sample.columns["loss_mask"] > 0, -algorithm.kl_coef * divergence, 0.0))
    return penalties


def penalised(batch: Batch, values: Values, algorithm: Algorithm) -> Values:
    """Advantages less kl_coef x KL at each token: the penalty of estimators that give a sample one number."""
    if not algorithm.kl_coef:
        return values
    return [value + penalty for value, penalty in zip(values, kl_penalties(batch, algorithm), strict=True)]


def token_rewards(batch: Batch, algorithm: Algorithm) -> list[np.ndarray]:
    """[R] float64 per sample: the KL penalty at each token, and the sample's reward on top at the last trained one.

    A sample without a trained token has rewards of 0.

    Raises:
        TrainError, RewardError: see `rollout_rewards`.
    """
    penalties = kl_penalties(batch, algorithm)
    rewards = (reward for group in batch.groups for reward in to_samples(group, rollout_rewards(group)))
    for sample, row, reward in zip(batch.samples, penalties, rewards, strict=True):
        trained = np.flatnonzero(sample.columns["loss_mask"])
        if trained.size:
            row[trained[-1]] += reward
    return penalties


def _trainable_reward(sample: Sample) -> float:
    if not sample.status.finished:
        raise TrainError(f"{sample.name} must not be trained on", got=f"status {sample.status}",
                         fix="drop unfinished samples before the advantage stage", code="sample-not-trainable")
    if sample.reward is None or not abs(sample.reward) <= LARGEST_REWARD:
        raise RewardError(f"the reward of {sample.name} is not a finite float32", code="reward-not-finite",
                          got=repr(sample.reward),
                          fix="name a scorer with --rm-type, or let the generator set sample.reward")
    return sample.reward
