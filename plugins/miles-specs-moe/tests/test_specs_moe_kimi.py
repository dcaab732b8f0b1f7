"""Kimi K2 and K2.5 as they are released: names that transformers does not know, and a text model inside another."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from miles_megatron import hf_config
from miles_megatron.testing.checkpoints import tensors
from miles_megatron.testing.demo import demo_run
from miles_megatron.testing.parity import cases, random_model, save
from miles_specs_moe.families import kimi_k25
from safetensors.torch import save_file

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "arithmetic"
CASES = {case.family: case for case in cases(Path(__file__).with_name("parity.toml"))}
WORDS = {"vocab_size": 264, "num_hidden_layers": 2, "pad_token_id": 256, "bos_token_id": None, "eos_token_id": 258}


def checkpoint(folder, family):
    """A random one, whose config.json has the keys of the release."""
    case = replace(CASES[family], config={**CASES[family].config, **WORDS})
    save(random_model(case), case, folder)
    path = folder / "config.json"
    said = json.loads(path.read_text())
    text = said.get("text_config", said)
    rope = text.pop("rope_parameters")
    text |= {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "rope_theta": rope.pop("rope_theta"),
             "rope_scaling": {"type": rope.pop("rope_type"), **rope}, "scoring_func": "sigmoid",
             "topk_method": "noaux_tc", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    path.write_text(json.dumps(said))
    return folder


def test_a_text_model_is_read_where_transformers_does_not_know_what_it_is_inside_of(tmp_path):
    """Kimi K2.5 before transformers 5.13."""
    folder = checkpoint(tmp_path, "kimi_k25")
    known = hf_config.read(folder)
    unknown = hf_config.Unread(json.loads((folder / "config.json").read_text()), "kimi_k25", str(folder))
    assert kimi_k25(unknown).spec() == kimi_k25(known).spec()
    assert kimi_k25(unknown).weight_map() == kimi_k25(known).weight_map()


@pytest.mark.full
@pytest.mark.parametrize("family", ["kimi_k2", "kimi_k25"])
def test_a_run_needs_nothing_but_the_checkpoint(family, tmp_path):
    """The engine finds the class by its name in config.json, or decodes the text model inside; routes are replayed."""
    folder = checkpoint(tmp_path / "kimi", family)
    for file in (EXAMPLES / "tiny-qwen3").glob("*token*"):
        shutil.copy(file, folder)
    steps, _ = demo_run(ROOT, folder, tmp_path, "--use-rollout-routing-replay", "--entropy-coef", "0.01")
    assert len(steps) == 2
    assert all(one["train/train_rollout_logprob_abs_diff_max"] <= 2e-5 for one in steps)
    before, after = tensors(folder), tensors(tmp_path / "run" / "hf")
    norm = CASES[family].inside + "model.norm.weight"
    assert before.keys() == after.keys() and not torch.equal(before[norm], after[norm])
    assert json.loads((tmp_path / "run" / "hf" / "config.json").read_text())["model_type"] == family


def test_conversion_of_kimi_k25_keeps_every_bit_of_text_model_and_tower(convert, tmp_path):
    folder = checkpoint(tmp_path / "kimi", "kimi_k25")
    before = tensors(folder) | {name: torch.randn(3, 5).bfloat16() for name in (
        "vision_tower.encoder.blocks.0.wo.weight", "mm_projector.proj.0.weight")}
    save_file(before, folder / "model.safetensors", {"format": "pt"})
    convert("hf-to-dist", folder, tmp_path / "dist")
    convert("dist-to-hf", tmp_path / "dist", tmp_path / "back", "--hf-checkpoint", folder)
    after = tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)
