"""Gemma 3 from 4B on, and Gemma 4: the text model inside, a vision tower, and what lies between them."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from miles_megatron.testing.checkpoints import tensors
from miles_megatron.testing.demo import demo_run
from miles_megatron.testing.parity import cases, random_model
from safetensors.torch import save_file

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "arithmetic"
CASES = {case.family: case for case in reversed(cases(Path(__file__).with_name("parity.toml")))}
WORDS = {"vocab_size": 264, "pad_token_id": 256, "bos_token_id": None, "eos_token_id": 258}
IDS = {name: 263 for name in ("boi_token_id", "eoi_token_id", "image_token_id", "video_token_id", "boa_token_id",
                              "eoa_token_index", "audio_token_id")}
CHANGES = {"gemma3": {"image_token_index": 263, "text_config": {"num_hidden_layers": 3}}, "gemma4": IDS,
           "gemma4_unified": IDS}
INSIDE = "language_model.model."
BESIDE = {"gemma3": ("vision_tower.", "multi_modal_projector."),
          "gemma4": ("model.vision_tower.", "model.embed_vision."),
          "gemma4_unified": ("model.vision_embedder.", "model.embed_vision.", "model.embed_audio.")}


@pytest.fixture(scope="module", params=CHANGES)
def folder(request, tmp_path_factory):
    """A random one whose vocabulary is the examples'."""
    case, made = CASES[request.param], tmp_path_factory.mktemp(request.param)
    text = {**case.text, **WORDS, **CHANGES[request.param].get("text_config", {})}
    config = {**case.config, **CHANGES[request.param], "eos_token_id": 258, "text_config": text}
    random_model(replace(case, config=config)).save_pretrained(made)
    for file in (EXAMPLES / "tiny-qwen3").glob("*token*"):
        shutil.copy(file, made)
    return made


@pytest.mark.full
def test_a_run_trains_the_text_model_and_carries_the_tower(folder, tmp_path):
    """Two rollouts: the engine decodes what the trainer trains; the export has the checkpoint's names and its tower."""
    steps, _ = demo_run(ROOT, folder, tmp_path, "--entropy-coef", "0.01")
    assert len(steps) == 2
    assert all(one["train/train_rollout_logprob_abs_diff_max"] <= 2e-5 for one in steps)
    before, after = tensors(folder), tensors(tmp_path / "run" / "hf")
    assert before.keys() == after.keys()
    family = json.loads((tmp_path / "run" / "hf" / "config.json").read_text())["model_type"]
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if name.startswith(BESIDE[family]) or name.endswith("layer_scalar")}


@pytest.mark.parametrize("own", [False, True], ids=["names of the releases", "names of transformers' modules"])
def test_conversion_keeps_every_bit_of_text_model_and_tower(folder, convert, tmp_path, own):
    before = tensors(folder)
    if own and any(name.startswith(INSIDE) for name in before):  # Gemma 4 is released under these names
        before = {name.replace(INSIDE, "language_model."): tensor for name, tensor in before.items()}
        before = {f"model.{name}": tensor for name, tensor in before.items()}
    shutil.copytree(folder, tmp_path / "gemma")
    save_file(before, tmp_path / "gemma" / "model.safetensors", {"format": "pt"})
    convert("hf-to-dist", tmp_path / "gemma", tmp_path / "dist")
    convert("dist-to-hf", tmp_path / "dist", tmp_path / "back", "--hf-checkpoint", tmp_path / "gemma")
    after = tensors(tmp_path / "back")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
