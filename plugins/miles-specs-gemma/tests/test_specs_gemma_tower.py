"""Gemma 3 as it is released from 4B on: the text model inside, a vision tower, and what lies between them."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from miles_megatron.testing.parity import cases, random_model
from miles_testing.forked import miles
from safetensors.torch import load_file, save_file

from miles_core.record.events import read

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "arithmetic"
CASE = next(case for case in cases(Path(__file__).with_name("parity.toml")) if case.family == "gemma3")
WORDS = {"vocab_size": 264, "num_hidden_layers": 3, "pad_token_id": 256, "bos_token_id": None, "eos_token_id": 258}
INSIDE = "language_model.model."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random one whose vocabulary is the examples'."""
    found = tmp_path_factory.mktemp("gemma3")
    config = {**CASE.config, "image_token_index": 263, "eos_token_id": 258, "text_config": {**CASE.text, **WORDS}}
    random_model(replace(CASE, config=config)).save_pretrained(found)
    for file in (EXAMPLES / "tiny-qwen3").glob("*token*"):
        shutil.copy(file, found)
    return found


def tensors(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.full
def test_a_run_trains_the_text_model_and_carries_the_tower(folder, tmp_path):
    """Two rollouts: the engine decodes what the trainer trains; the export has the checkpoint's names and its tower."""
    outcome = miles(["run", str(ROOT / "examples/demo.toml"), "--no-live", "--hf-checkpoint", str(folder),
                     "--prompt-data", str(EXAMPLES / "train.jsonl"), "--run-dir", "run", "--num-rollout", "2",
                     "--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--eval-interval", "100",
                     "--eval-prompt-data", "sums", str(EXAMPLES / "eval.jsonl"), "--save-interval", "2",
                     "--entropy-coef", "0.01"], tmp_path)  # fmt: skip
    assert outcome.code == 0, outcome.err
    metrics = [event["metrics"] for event in read(tmp_path / "run" / "events.jsonl") if event["event"] == "metrics"]
    steps = [one for one in metrics if "train/train_rollout_logprob_abs_diff_max" in one]
    assert len(steps) == 2
    assert all(one["train/train_rollout_logprob_abs_diff_max"] <= 2e-5 for one in steps)
    before, after = tensors(folder), tensors(tmp_path / "run" / "hf")
    assert before.keys() == after.keys()
    assert json.loads((tmp_path / "run" / "hf" / "config.json").read_text())["model_type"] == "gemma3"
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if name.startswith(("vision_tower.", "multi_modal_projector."))}


@pytest.mark.parametrize("own", [False, True], ids=["names of the releases", "names of transformers' modules"])
def test_conversion_keeps_every_bit_of_text_model_and_tower(folder, convert, tmp_path, own):
    before = tensors(folder)
    if own:
        before = {name.replace(INSIDE, "language_model."): tensor for name, tensor in before.items()}
        before = {f"model.{name}": tensor for name, tensor in before.items()}
    shutil.copytree(folder, tmp_path / "gemma")
    save_file(before, tmp_path / "gemma" / "model.safetensors", {"format": "pt"})
    convert("hf-to-dist", tmp_path / "gemma", tmp_path / "dist")
    convert("dist-to-hf", tmp_path / "dist", tmp_path / "back", "--hf-checkpoint", tmp_path / "gemma")
    after = tensors(tmp_path / "back")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
