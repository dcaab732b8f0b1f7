"""A synthetic run that looks like a real one: a model learns to add, is killed once, resumed, and finishes."""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path

import numpy as np
import pytest

from miles_core.record.directory import RunDirectory, publish
from miles_core.record.events import EventLog
from miles_core.record.samples import write_samples
from miles_core.types import Prompt, Sample, Status

PIECES = [str(n) for n in range(20)] + [" ", "+", "=", "\n", "The", " sum", " is", " so", ",", ".", "<eos>", "?"]
EOS = PIECES.index("<eos>")
PLAN = """run              addition
plugins          grpo 0.1.0 (named), math-reward 0.1.0 (named)
estimator        grpo        --advantage-estimator
engine           local       default
trainer          megatron    default      1 rank, tp 1, float32
rollout          8 prompts x 8 samples = 64 samples, 1 optimizer step
schedule         {rollouts} rollouts, eval every 10, checkpoint every 10
"""


def decode(token: int) -> str:
    return PIECES[token]


def make_sample(rng: np.random.Generator, uid: int, index: int, skill: float, version: int, text: str = "") -> Sample:
    """One answer to "a + b"; right with probability `skill`."""
    a, b = (uid * 7) % 10, (uid * 3) % 10
    right = bool(rng.random() < skill)
    words = [PIECES.index(w) for w in ("The", " sum", " is", " ")][: int(rng.integers(0, 5))]
    answer = a + b if right else int(rng.integers(0, 19))
    ids = [*words, answer, EOS] if skill > 0.2 or right else [*words, answer, *rng.integers(20, 30, 6).tolist()]
    prompt_ids = [a, PIECES.index("+"), b, PIECES.index("=")]
    length = len(ids)
    log_probs = -rng.exponential(1.4 * (1.05 - skill), length)
    mask = np.ones(length, np.uint8)
    if uid % 5 == 4 and length > 3:  # as a tool's words would be
        mask[1:3] = 0
    versions = np.full(length, version, np.int32)
    if version > 3 and uid % 7 == 3:
        versions[: length // 2] -= 1
    sample = Sample(
        Prompt(uid, uid % 40, f"What is {a} + {b}?\n{text}", tuple(prompt_ids), label=str(a + b)), index,
        {"tokens": np.array([*prompt_ids, *ids], np.int32), "loss_mask": mask, "versions": versions,
         "rollout_log_probs": log_probs.astype(np.float32)},
        length, "".join(map(decode, ids)), Status.COMPLETED if ids[-1] == EOS else Status.TRUNCATED,
    )
    score = float(answer == a + b)
    sample.rewards = {"math": score, "format": round(float(rng.random() * skill), 2)}
    sample.reward = score + 0.2 * sample.rewards["format"]
    sample.columns["advantages"] = np.full(length, score - skill, np.float32)
    return sample


def skill(rollout_id: int) -> float:
    return 0.06 + 0.9 / (1 + math.exp(-(rollout_id - 24) / 7))


def rollout_metrics(rng: np.random.Generator, rollout_id: int) -> dict[str, float]:
    s, noise = skill(rollout_id), lambda width: float(rng.normal(0, width))
    took = {"rollout": 0.35 + abs(noise(0.05)), "log_probs": 0.09 + abs(noise(0.01)),
            "actor_train": 0.5 + abs(noise(0.06)), "update_weights": 0.012}
    return {
        "rollout/raw_reward": s + noise(0.05),
        "rollout/response_len/mean": 9 - 5 * s + noise(0.3),
        "rollout/response_len/median": 8.8 - 5 * s,
        "rollout/response_len/min": 4 - 2 * s,
        "rollout/response_len/max": 12 - 4 * s,
        "rollout/log_probs": s - 1.3,
        "rollout/rollout_log_probs": s - 1.3,
        "rollout/truncated_ratio": max(0.0, 0.5 - s + abs(noise(0.02))),
        "rollout/zero_std/all_zero_percentage": max(0.0, 0.6 - s),
        "rollout/entropy": 1.4 * (1.1 - s) + abs(noise(0.05)),
        "train/loss": noise(0.02) - 0.01 * s,
        "train/pg_loss": -0.01 * s,
        "train/kl_loss": 0.001 * s,
        "train/pg_clipfrac": abs(noise(0.01)),
        "train/ppo_kl": abs(noise(0.0008)),
        "train/grad_norm": math.nan if rollout_id == 41 else 0.4 + 12 * math.exp(-rollout_id / 4) + abs(noise(0.1)),
        "train/lr-pg_0": 1e-5 * min(1, rollout_id / 10),
        "train/train_rollout_logprob_abs_diff": 2e-7 + abs(noise(4e-8)),
        "train/step": rollout_id,
        **{f"perf/{name}_time": seconds for name, seconds in took.items()},
        "perf/step_time": sum(took.values()) + 0.02,
        "perf/tokens_per_gpu_per_sec": 1400 + noise(60),
        "perf/hooks/math-reward/reward": 0.006, "perf/hook_calls/math-reward/reward": 64.0,
        "perf/hooks/tis/token_weights": 0.001 * rollout_id, "perf/hook_calls/tis/token_weights": 2.0,
    }


def make_run(path: Path, rollouts: int = 60, resumed: int | None = 36, end: str | None = "completed",
             samples: bool = True, hostile: str = "", width: int = 8) -> Path:
    """Write a run; `resumed` is where a second start begins, three rollouts before the first was killed."""
    rng, run = np.random.default_rng(0), RunDirectory(path)
    clock = itertools.count(1_760_000_000.0, 0.35).__next__
    with run:
        publish(run.plan_json, '{"name": "addition"}')
        publish(run.plan_text, PLAN.format(rollouts=rollouts) + hostile)
        log = EventLog(run.events, clock=clock)
        spans = [(0, rollouts)] if resumed is None else [(0, min(resumed + 3, rollouts)), (resumed, rollouts)]
        for first, stop in spans:
            log.run_start("9f2c1ab04be7d3555d0c", {"miles-core": "0.1.0", "megatron-core": "0.16.1", "torch": "2.13.0"},
                          resumed_from=first or None, rollouts=rollouts)
            if first:
                log.append("message", level="info",
                           text=f"Loaded checkpoint from runs/addition/checkpoints at rollout {first}")
            for rollout_id in range(first, stop):
                _one_rollout(run, log, rng, rollout_id, samples, hostile, width)
        if end is not None:
            log.run_end(end, None if end == "completed" else f"EngineError: local: decoding died {hostile}")
        log.close()
    for file in run.samples.iterdir():  # files are as old as their events say, not as this test
        os.utime(file, (clock(), clock()))
    return path


def _one_rollout(run, log, rng, rollout_id, samples, hostile, width):
    if rollout_id == 0:
        log.append("weight_sync", version=1, seconds=0.021, tensors=201, bytes=1_192_135_168)
        log.append("eval", 0, metrics={"eval/addition": 0.05, "eval/addition-truncated_ratio": 0.5, "eval/carry": 0.01})
    if samples:
        groups = [make_sample(rng, rollout_id * width + g, i, skill(rollout_id), rollout_id + 1, hostile)
                  for g in range(width) for i in range(8)]
        write_samples(run, "rollout", rollout_id, groups, decode)
    if rollout_id < 30:
        log.append("drop", rollout_id, reason="zero reward variance", count=int(rng.integers(1, 6)))
    if rollout_id % 9 == 3:
        log.append("drop", rollout_id, reason="response too long", count=1)
    log.append("metrics", rollout_id, metrics=rollout_metrics(rng, rollout_id))
    log.append("weight_sync", rollout_id, version=rollout_id + 2, seconds=0.012, tensors=201, bytes=1_192_135_168)
    if rollout_id == 41:
        log.append("message", rollout_id, level="warning",
                   text=f"gradient norm is not finite: step skipped, see debug/41 {hostile}")
    if rollout_id % 10 == 9:
        score, done = skill(rollout_id), rollout_id + 1  # evals are of the weights that the next rollout samples from
        log.append("eval", done, metrics={"eval/addition": score, "eval/addition-truncated_ratio": max(0, 0.5 - score),
                              "eval/carry": 0.8 * score})
        log.append("checkpoint", rollout_id, path="runs/addition/checkpoints", seconds=0.41)
        if samples:
            answers = [make_sample(rng, g, 0, score, rollout_id + 2, hostile) for g in range(16)]
            write_samples(run, "eval_addition", done, answers, decode)


# As fixtures, so that tests need no import of this file under any import mode.


@pytest.fixture(name="make_run")
def _make_run():
    return make_run


@pytest.fixture(name="make_sample")
def _make_sample():
    return make_sample


@pytest.fixture(name="decode")
def _decode():
    return decode


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "addition")
