"""Runs with images: engine and trainer compute the same, and what they compute depends on the image."""

from __future__ import annotations

import base64
import json

import pytest
from miles_testing import toy_run
from miles_vision.checks import check

from miles_core.config.load import with_values
from miles_core.config.tables import RunConfig
from miles_core.errors import MilesError

FLAGS = ["--multimodal-keys", '{"image": "pictures"}', "--rollout-max-response-len", "8"]
OPTIONS = {"perf.trainer": "fsdp", "rollout.rollout_temperature": 0.8, "rollout.rollout_max_context_len": 200}


@pytest.mark.parametrize("kind", ["qwen2_5_vl", *(pytest.param(one, marks=pytest.mark.full)
                                                  for one in ("qwen3_vl", "gemma3"))])
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


@pytest.mark.full  # three runs
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


@pytest.mark.full
def test_a_row_whose_image_is_damaged_is_dropped_and_counted_and_the_run_goes_on(checkpoint, tmp_path):
    folder = checkpoint("qwen2_5_vl")
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    rows[0]["pictures"] = [base64.b64encode(b"no image").decode()]
    (folder / "damaged.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = toy_run(["fsdp", "vision"], steps=1, checkpoint=folder, flags=FLAGS,
                  options=OPTIONS | {"rollout.prompt_data": str(folder / "damaged.jsonl")})
    assert run.metrics[0]["rollout/dynamic_filter/drop_image_damaged"] == 1
    assert [event["reason"] for event in run.events if event["event"] == "drop"] == ["image_damaged"]


IMAGE = {"image": "pictures"}


@pytest.mark.parametrize(("changed", "keys", "removed", "code"), [
    ({}, {}, None, "vision-keys"), ({}, IMAGE | {"video": "clips"}, None, "vision-keys"),
    ({"perf__trainer": "megatron"}, IMAGE, None, "vision-trainer"),
    ({"fsdp__context_parallel_size": 2}, IMAGE, None, "vision-context-parallel"),
    ({}, IMAGE, "image_token_id", "vision-model-without-images"),
    ({}, IMAGE, "vision_config", "vision-model-without-images"),
    ({}, IMAGE, "preprocessor_config.json", "vision-processor-missing"),
])
def test_settings_that_would_ignore_images_are_named_before_the_start(changed, keys, removed, code, tmp_path):
    said = {"image_token_id": 261, "vision_config": {}}
    said.pop(removed, None)
    (tmp_path / "config.json").write_text(json.dumps(said))
    if removed != "preprocessor_config.json":
        (tmp_path / "preprocessor_config.json").write_text("{}")
    settings = {"checkpoint__hf_checkpoint": str(tmp_path), "perf__trainer": "fsdp"} | changed
    config = with_values(RunConfig(), "test", **settings)
    with pytest.raises(MilesError) as caught:
        check(config, keys)
    assert caught.value.code == code
