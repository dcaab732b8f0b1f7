"""Runs with images: engine and trainer compute the same, and what they compute depends on the image."""

from __future__ import annotations

import json

import pytest
from miles_testing import toy_run

FLAGS = ["--multimodal-keys", '{"image": "pictures"}', "--rollout-max-response-len", "8"]
OPTIONS = {"perf.trainer": "fsdp", "rollout.rollout_temperature": 0.8, "rollout.rollout_max_context_len": 200}


@pytest.mark.parametrize("kind", ["qwen2_5_vl"])
def test_engine_and_trainer_agree_on_prompts_with_images(kind, checkpoint):
    run = toy_run(["fsdp", "vision"], steps=2, checkpoint=checkpoint(kind), flags=FLAGS, options=OPTIONS)
    gaps = [one["train/train_rollout_logprob_abs_diff_max"] for one in run.metrics]
    print(kind, gaps, [one["train/grad_norm"] for one in run.metrics])
    assert len(gaps) == 2 and max(gaps) <= 1e-4
    assert all(one["train/grad_norm"] > 0 for one in run.metrics)


def hashes(run):
    """rollout -> what was trained on and what came of it."""
    lines = map(json.loads, (run.folder / "hashes.jsonl").read_text(encoding="utf-8").splitlines())
    return {line["rollout_id"]: (line["weights"], line["batch"]) for line in lines if "weights" in line}


def test_a_resumed_run_is_bitwise_the_one_that_went_on(checkpoint, tmp_path):
    folder = str(tmp_path / "saved")
    flags = [*FLAGS, "--debug-determinism"]
    whole = toy_run(["fsdp", "vision"], steps=2, checkpoint=checkpoint("qwen2_5_vl"), flags=flags, options=OPTIONS)
    saving = [*flags, "--save", folder, "--load", folder, "--save-interval", "1"]
    first = toy_run(["fsdp", "vision"], steps=2, checkpoint=checkpoint("qwen2_5_vl"), options=OPTIONS,
                    flags=[*saving, "--debug-exit-after-rollout", "1"])
    second = toy_run(["fsdp", "vision"], steps=2, checkpoint=checkpoint("qwen2_5_vl"), options=OPTIONS, flags=saving)
    assert [*hashes(first), *hashes(second)] == [0, 1]
    assert hashes(first) | hashes(second) == hashes(whole)
