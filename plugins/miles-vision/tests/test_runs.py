"""Runs with images: engine and trainer compute the same, and what they compute depends on the image."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest
from miles_testing import toy_run
from miles_vision.checks import check
from pictures import picture

from miles_core.config.load import with_values
from miles_core.config.tables import RunConfig
from miles_core.errors import MilesError
from miles_core.plugins.plan import prepare
from miles_core.record.events import read

ROOT = Path(__file__).parents[3]

FLAGS = ["--multimodal-keys", '{"image": "pictures"}', "--rollout-max-response-len", "8"]
OPTIONS = {"perf.trainer": "fsdp", "rollout.rollout_temperature": 0.8, "rollout.rollout_max_context_len": 200}
SUPERVISED = {"rollout.generate": "sft", "algorithm.loss_type": "sft_loss", "algorithm.advantage_estimator": "sft",
              "rollout.n_samples_per_prompt": 1, "algorithm.skip_actor_forward_only": True, "optimizer.lr": 1e-2}


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


@pytest.mark.full
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_demonstrations_train_the_tower_unless_it_is_frozen(checkpoint, frozen):
    """An answer of a row's own behind the tokens of its images; the loss falls either way."""
    import torch
    from safetensors.torch import load_file

    folder = checkpoint("qwen2_5_vl")
    out = folder / "trained"
    freezing = ["--plugin", "param-groups", "--freeze-params-name-list", "visual"] if frozen else []
    run = toy_run(["fsdp", "vision", "sft"], steps=4, checkpoint=folder, options=OPTIONS | SUPERVISED,
                  flags=[*FLAGS, "--save-hf", str(out), "--save", str(folder / "saved"), *freezing])
    losses = [one["train/loss"] for one in run.metrics]
    assert losses[-1] < losses[0]
    before, after = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    unmoved = {name for name in before if torch.equal(before[name], after[name])}
    tower = {name for name in before if "visual" in name}
    assert tower and (unmoved == tower if frozen else not tower <= unmoved)
    assert (out / "preprocessor_config.json").is_file()


@pytest.mark.parametrize("supervised", [False, True], ids=["grpo", "sft"])
def test_rows_without_any_image_train_a_model_that_reads_them(supervised, checkpoint, tmp_path):
    """They name no images, or none of theirs; the engine and the trainer agree on them, too."""
    rows = [{"prompt": f"What is {number}?", "label": str(number)} | ({"pictures": []} if number % 2 else {})
            for number in range(8)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = OPTIONS | (SUPERVISED if supervised else {}) | {"rollout.prompt_data": str(tmp_path / "text.jsonl")}
    run = toy_run(["fsdp", "vision", *["sft"] * supervised], steps=2, checkpoint=checkpoint("qwen2_5_vl"), flags=FLAGS,
                  options=options)
    assert len(run.metrics) == 2 and not (run.folder / "images").exists()
    assert all(one["train/loss"] > 0 if supervised else one["train/train_rollout_logprob_abs_diff_max"] <= 1e-4
               for one in run.metrics)


@pytest.mark.full
def test_images_in_columns_of_parquet_are_those_of_jsonl(checkpoint, tmp_path):
    """As bytes and as the package datasets writes them; the runs are the same, bit for bit."""
    import pyarrow.parquet

    folder = checkpoint("qwen2_5_vl")
    data = picture()
    rows = [{"prompt": f"<image>What is {number}?", "label": "1"} for number in range(8)]
    images = {"jsonl": [[base64.b64encode(data).decode()]] * 8, "bytes": [[data]] * 8,
              "structs": [[{"bytes": data, "path": "a.png"}]] * 8}
    seen = []
    for name, column in images.items():
        path = tmp_path / (f"{name}.jsonl" if name == "jsonl" else f"{name}.parquet")
        whole = [row | {"pictures": value} for row, value in zip(rows, column, strict=True)]
        if name == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in whole))
        else:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(whole), path)
        run = toy_run(["fsdp", "vision"], steps=1, checkpoint=folder, flags=[*FLAGS, "--debug-determinism"],
                      options=OPTIONS | {"rollout.prompt_data": str(path)})
        seen.append(hashes(run))
    assert seen[0] and seen[0] == seen[1] == seen[2]


def test_other_images_make_other_prompts_where_a_plan_compares_training_and_evaluation(checkpoint, tmp_path):
    folder = checkpoint("qwen2_5_vl")
    (tmp_path / "run.toml").write_text('plugins = ["grpo", "vision"]\n')
    parts = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many?"}]}]
    for name, count in (("train", 4), ("eval", 8)):
        rows = [{"prompt": parts if number % 2 else "<image>How many?", "label": "1", "pictures": [f"{number}.png"]}
                for number in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = prepare(tmp_path / "run.toml", [
        "--trainer", "fsdp", "--hf-checkpoint", str(folder), "--prompt-data", str(tmp_path / "train.jsonl"),
        "--eval-prompt-data", "seen", str(tmp_path / "eval.jsonl"), "--eval-interval", "1", "--input-key", "prompt",
        "--label-key", "label", "--apply-chat-template", "--num-rollout", "1", "--rollout-batch-size", "4",
        "--n-samples-per-prompt", "2", "--rollout-max-response-len", "8", "--rm-type", "f1", *FLAGS[:2]])
    assert [note for note in plan.notes if note.startswith("4 of the first 8 evaluation prompts")]


@pytest.mark.slow  # the warm start and two runs: three minutes of CPU
def test_the_recipe_learns_by_the_images_and_by_nothing_else(tmp_path, monkeypatch):
    for name in ("examples", "plugins", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, "plugins/miles-vision/examples/make_shapes.py"], check=True, timeout=900,
                   stdout=subprocess.DEVNULL)
    miles, scores = Path(sys.executable).with_name("miles"), {}
    command = [miles, "run", "recipes/grpo-shapes/recipe.toml", "--no-live"]
    for name in ("train", "train-blank"):
        subprocess.run([*command, "--run-dir", name, "--prompt-data", f"runs/shapes/{name}.jsonl"], check=True,
                       timeout=900, stdout=subprocess.DEVNULL)
        events = [event["metrics"] for event in read(tmp_path / name / "events.jsonl") if event["event"] == "eval"]
        for dataset in ("eval/circles", "eval/blank"):
            scores[name, dataset] = [one[dataset] for one in events if dataset in one]
    assert scores["train", "eval/circles"][-1] - scores["train", "eval/circles"][0] > 0.2
    for where in (("train", "eval/blank"), ("train-blank", "eval/blank"), ("train-blank", "eval/circles")):
        assert max(scores[where]) <= 0.2


IMAGE = {"image": "pictures"}


def test_mistral_s_images_are_refused_with_a_server_which_would_not_keep_the_ids_of_their_rows(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral3"}))
    config = with_values(RunConfig(), "test", checkpoint__hf_checkpoint=str(tmp_path), perf__trainer="fsdp",
                         rollout__engine="sglang")
    with pytest.raises(MilesError) as caught:
        check(config, IMAGE)
    assert caught.value.code == "vision-setting" and "rollout.engine" in caught.value.who


@pytest.mark.parametrize(("changed", "keys", "removed", "code"), [
    ({}, {}, None, "vision-setting"), ({}, IMAGE | {"video": "clips"}, None, "vision-setting"),
    ({"perf__trainer": "another"}, IMAGE, None, "vision-setting"),
    ({"perf__trainer": "megatron"}, IMAGE, None, "vision-setting"),
    ({"perf__trainer": "megatron", "perf__weight_sync": "adapter"}, IMAGE, "model_type", "vision-setting"),
    ({"fsdp__context_parallel_size": 2}, IMAGE, None, "vision-setting"),
    ({"rollout__rollout_ignore_eos": True}, IMAGE, None, "vision-setting"),
    ({"rollout__engine": "vllm"}, IMAGE, None, "vision-setting"),
    ({"rollout__engine": "sglang"}, IMAGE, None, "vision-setting"),
    ({}, IMAGE, "image_token_id", "vision-model-without-images"),
    ({}, IMAGE, "vision_config", "vision-model-without-images"),
    ({}, IMAGE, "preprocessor_config.json", "vision-processor-missing"),
])
def test_settings_that_would_ignore_images_are_named_before_the_start(changed, keys, removed, code, tmp_path):
    kind = "gemma4" if changed.get("perf__trainer") == "megatron" else "gemma3"
    said = {"model_type": kind, "image_token_id": 261, "vision_config": {}}
    said.pop(removed, None)
    (tmp_path / "config.json").write_text(json.dumps(said))
    if removed != "preprocessor_config.json":
        (tmp_path / "preprocessor_config.json").write_text("{}")
    settings = {"checkpoint__hf_checkpoint": str(tmp_path), "perf__trainer": "fsdp"} | changed
    config = with_values(RunConfig(), "test", **settings)
    with pytest.raises(MilesError) as caught:
        check(config, keys)
    assert caught.value.code == code
