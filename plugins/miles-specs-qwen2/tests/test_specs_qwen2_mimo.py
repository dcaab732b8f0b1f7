"""MiMo as it is released: a layer for drafting in the files, and a model_type that transformers does not have."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from miles_megatron.hf_config import read
from miles_megatron.testing.parity import TINY, cases, random_model, save
from miles_specs_qwen2.families import mimo
from safetensors.torch import load_file, save_file

from miles_core.errors import ConfigError

CASE = next(case for case in cases(Path(__file__).with_name("parity.toml")) if case.family == "mimo")


def checkpoint(folder):
    case = replace(CASE, config={**CASE.config, "num_hidden_layers": 2})
    whole, hidden = save(random_model(case), case, folder), TINY["hidden_size"]
    last, first = "model.layers.1.", "model.mtp_layers.0."
    whole |= {name.replace(last, first): 2 * tensor for name, tensor in whole.items() if name.startswith(last)}
    whole |= {f"{first}{name}.weight": torch.randn(hidden) for name in ("token_layernorm", "hidden_layernorm",
                                                                       "final_layernorm")}
    whole[first + "input_proj.weight"] = torch.randn(hidden, 2 * hidden)
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {
        "architectures": ["MiMoForCausalLM"], "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"}}))
    return whole


@pytest.mark.parametrize("plugins", [(), ("--plugin", "mtp")], ids=["left", "kept"])
def test_the_layer_for_drafting_is_left_or_kept(convert, tmp_path, plugins):
    before = checkpoint(tmp_path / "mimo")
    convert("hf-to-dist", tmp_path / "mimo", tmp_path / "dist", *plugins)
    convert("dist-to-hf", tmp_path / "dist", tmp_path / "back", "--hf-checkpoint", tmp_path / "mimo", *plugins)
    after = load_file(tmp_path / "back" / "model.safetensors")
    assert after.keys() == {name for name in before if plugins or "mtp_layers" not in name}
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
    said = json.loads((tmp_path / "back" / "config.json").read_text())
    assert said["model_type"] == "mimo" and said["num_nextn_predict_layers"] == len(plugins) // 2


def test_without_biases_it_is_refused(tmp_path):
    checkpoint(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attention_bias": False}))
    with pytest.raises(ConfigError, match="attention_bias"):
        mimo(read(tmp_path))
