"""What a rollout brought, as metrics."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from miles_core.config.tables import RunConfig
from miles_core.types import Batch, Sample, rollout_keys


def rollout_metrics(batch: Batch) -> dict[str, float]:
    """Miles's names for what a rollout brought; without a reward where there are only demonstrations nobody scored."""
    samples = batch.samples
    rollouts = [dict(zip(rollout_keys(one), one.samples)).values() for one in batch.groups]  # a sample of each
    rewards = np.array([s.reward for one in rollouts for s in one])
    lengths = np.array([s.response_length for s in samples])
    behind = np.concatenate([(batch.version - s.columns["versions"])[s.columns["loss_mask"] > 0] for s in samples])
    oldest = min((s.columns["versions"].min() for s in samples if s.response_length), default=batch.version)
    alike = [np.ptp([s.reward for s in one]) == 0 for one in rollouts if len(one) > 1]
    metrics = {
        **({"rollout/raw_reward": np.mean([s.metadata.get("raw_reward", s.reward) for one in rollouts for s in one])}
           if rewards.any() or any(s.rewards or s.columns["rollout_log_probs"].any() for s in samples) else {}),
        **({"rollout/rewards": rewards.mean()} if any("raw_reward" in s.metadata for s in samples) else {}),
        **{f"rollout/response_len/{name}": getattr(np, name)(lengths) for name in ("mean", "median", "max", "min")},
        "rollout/truncated_ratio": np.mean([s.status == "truncated" for s in samples]),
        **({"rollout/zero_std/percentage": np.mean(alike)} if alike else {})}
    if oldest:  # tokens of version 0, as --debug-rollout-only draws them, are of weights whose age nobody knows
        metrics |= {
            "rollout/weight_version/lag": batch.version - oldest, "rollout/staleness/max": behind.max(initial=0),
            "rollout/staleness/mean": behind.mean() if len(behind) else 0,
            "rollout/off_policy_tokens": np.mean(behind > 0) if len(behind) else 0}
    return {name: float(value) for name, value in {**metrics, **figures(samples, "rollout/")}.items()}


def times(batch: Batch, metrics: Mapping[str, float], config: RunConfig, gpus: int) -> dict[str, float]:
    """Seconds of a step, the share that the trainer waits, and response tokens per second of each of the `gpus`."""
    waited, tokens = metrics["perf/rollout_time"], sum(sample.response_length for sample in batch.samples)
    step = waited + metrics["perf/train_time"] + metrics["perf/update_weights_time"]
    seconds = (step if config.rollout.max_lag else waited) * gpus
    rates = {"perf/tokens_per_gpu_per_sec": tokens / seconds} if seconds else {}
    return {"perf/step_time": step, **rates, **({"perf/wait_time_ratio": waited / step} if step else {})}


def figures(samples: list[Sample], under: str = "") -> dict[str, float]:
    """The mean of each figure and of each scorer's reward over the samples that have it."""
    each = [{f"reward/{name}": one for name, one in s.rewards.items()} | s.metadata.get("figures", {}) for s in samples]
    return {under + key: float(np.mean([one[key] for one in each if key in one])) for key in sorted(set().union(*each))}
