"""Whole runs and conversions of random models with the tokenizer of the tiny examples."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from miles_megatron.testing.checkpoints import tensors
from miles_megatron.testing.demo import demo_run
from miles_megatron.testing.parity import cases, random_model

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "arithmetic"
WORDS = {"vocab_size": 264, "num_hidden_layers": 4, "pad_token_id": 256, "bos_token_id": None, "eos_token_id": 258}
FAMILIES = {case.family: case for case in cases(Path(__file__).with_name("parity.toml"))}  # the last case of each
NEW = ("smollm3", "granite", "phi3", "olmo2", "olmo3", "llama4", "ministral", "ministral3", "mistral3", "mistral4")
ROUTED = {"mistral3", "mistral4"}
SEEING = ("vision_model.", "vision_tower.", "multi_modal_projector.")


def checkpoint(family, folder):
    case = FAMILIES[family]
    config = {**case.config, **WORDS}
    if "text_config" in case.config:  # transformers does not let Llama 4's queries grow while it decodes
        cold = {"floor_scale": 8192} if family == "llama4" else {}
        config = {**case.config, "image_token_index": 263, "text_config": {**case.text, **WORDS, **cold}}
    random_model(replace(case, config=config)).save_pretrained(folder)
    for file in (EXAMPLES / "tiny-qwen3").glob("*token*"):
        shutil.copy(file, folder)
    return folder


@pytest.mark.full
@pytest.mark.parametrize("family", NEW)
def test_a_run_needs_nothing_but_the_checkpoint(family, tmp_path):
    """The engine decodes what the trainer trains; every tensor of text moves, and is exported under its name."""
    folder = checkpoint(family, tmp_path / "model")
    replay = ["--use-rollout-routing-replay"] if family in ROUTED else []
    found = demo_run(ROOT, folder, tmp_path, "--entropy-coef", "0.01", *replay).differences
    assert len(found) == 2 and max(found) <= 2e-5
    before, after = tensors(folder), tensors(tmp_path / "run" / "hf")
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if name.startswith(SEEING)}


@pytest.mark.full
def test_adapters_of_one_tensor_of_queries_keys_and_values(tmp_path):
    """The engine, which gets them merged, computes what trains."""
    folder = checkpoint("phi3", tmp_path / "model")
    found = demo_run(ROOT, folder, tmp_path, "--entropy-coef", "0.01", "--plugin", "lora", "--lora-rank", "4",
                     "--lora-alpha", "8", "--target-modules", "all-linear", "--lr", "0.01").differences
    assert len(found) == 2 and max(found) <= 2e-5
    before, after = tensors(folder), tensors(tmp_path / "run" / "hf")
    assert not torch.equal(before["model.layers.0.self_attn.qkv_proj.weight"],
                           after["model.layers.0.self_attn.qkv_proj.weight"])


@pytest.mark.parametrize("family", ["phi3", *(pytest.param(name, marks=pytest.mark.full)
                                              for name in ("olmo3", "llama4", "mistral3"))])
def test_conversion_keeps_every_bit(family, convert, tmp_path):
    folder = checkpoint(family, tmp_path / "model")
    convert("hf-to-dist", folder, tmp_path / "dist")
    convert("dist-to-hf", tmp_path / "dist", tmp_path / "back", "--hf-checkpoint", folder)
    before, after = tensors(folder), tensors(tmp_path / "back")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
