"""Hugging Face directories: what is read has to be there, and what is written is what transformers reads again."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
import torch
from miles_fsdp import checkpoint
from miles_fsdp.module import read
from miles_fsdp.plugin import FsdpOptions
from miles_testing.tiny import tiny_checkpoint
from safetensors.torch import load_file, save_file

from miles_core.errors import CheckpointError


@pytest.mark.parametrize(("name", "shape"), [("model.layers.1.self_attn.q_norm.weight", None),
                                             ("model.layers.0.mlp.up_proj.weight", (40, 32))])
def test_weights_that_transformers_would_make_up_are_refused(tmp_path, name, shape):
    """It goes on with random numbers in place of a tensor that is not there."""
    folder = tiny_checkpoint(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors | ({name: torch.zeros(shape)} if shape else {}), folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        read(str(folder), FsdpOptions(), torch.float32)
    assert caught.value.code == ("fsdp-model-unbuildable" if shape else "fsdp-tensors-missing")
    assert str(folder) in str(caught.value) and (shape or name in str(caught.value))


def with_tensors(folder, **more):
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | more, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def test_tensors_that_the_model_does_not_have_are_told_of(tmp_path, caplog):
    folder = with_tensors(tiny_checkpoint(tmp_path / "model"), **{f"mtp.{i}.weight": torch.zeros(1) for i in range(5)})
    read(folder, FsdpOptions(), torch.float32)
    (told,) = [record.getMessage() for record in caplog.records if record.name == "miles_fsdp.module"]
    assert folder in told and "5 tensors" in told and "mtp.0.weight" in told


@pytest.mark.parametrize("differs", [True, False])
def test_an_output_layer_of_its_own_under_a_config_that_ties_it_is_refused(tmp_path, differs):
    """transformers would keep both apart, and an engine would tie them."""
    folder = tiny_checkpoint(tmp_path / "model")
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    with_tensors(folder, **{"lm_head.weight": embedding + differs})
    with pytest.raises(CheckpointError) if differs else nullcontext() as caught:
        read(str(folder), FsdpOptions(), torch.float32)
    assert not differs or caught.value.code == "fsdp-tied-tensors-differ" and "lm_head.weight" in str(caught.value)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_an_export_says_its_dtype_and_has_all_files_beside_the_weights(tmp_path, key):
    """Files in float32 under a config.json that says bfloat16 would be rounded by who loads them."""
    source = tiny_checkpoint(tmp_path / "model")
    constants = json.loads((source / "config.json").read_text())
    del constants["dtype"]
    (source / "config.json").write_text(json.dumps(constants | {key: "bfloat16"}))
    (source / "config.json").chmod(0o444)
    left = {"pytorch_model.bin.index.json", "model-00001-of-00001.safetensors", "hf_quant_config.json"}
    for name in ("words.tiktoken", "modeling.py", *left):
        (source / name).write_text("{}")
    weights = load_file(source / "model.safetensors")
    checkpoint.export(tmp_path / "out", iter(weights.items()), str(source), torch.float32)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == constants | {key: "float32"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in source.iterdir()} - left
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored.keys() == weights.keys() and all(torch.equal(stored[name], one) for name, one in weights.items())
