"""What the fast path reads from a checkpoint: the constants of its layers, and every tensor by its name."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from miles_local.decode import Decoder
from miles_local.weights import ModelShape, Weights, read_tensors
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

KINDS = ("dense", "tied", "moe", "moe-plain", "llama", "llama-tied", "mistral", "qwen2")
SCALINGS = {
    "default": {}, "linear": {"factor": 4.0}, "yarn": {"factor": 4.0, "original_max_position_embeddings": 160},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 80},
    "dynamic": {"factor": 2.0},
}  # fmt: skip


def read(folder, model_type="llama", **changes):
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4}
    AutoConfig.for_model(model_type, **{**sizes, "vocab_size": 96, **changes}).save_pretrained(folder)
    return ModelShape.read(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_its_names_and_shapes_are_those_on_disk(models, kind):
    folder, _ = models[kind]
    shape = ModelShape.read(folder)
    slots = Weights(shape, torch.float32).slots()
    assert {name: expected for name, (_, expected) in slots.items()} == {
        name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}


@pytest.mark.parametrize(("model_type", "changes", "expected"), [
    ("llama", {"sliding_window": 8, "layer_types": ["sliding_attention"] * 3}, {}),  # transformers' Llama has neither
    ("llama", {"attention_bias": True}, {"qkv_bias": True, "o_bias": True}),
    ("llama", {"mlp_bias": True}, {"mlp_bias": True}),
    ("mistral", {"attention_bias": True, "sliding_window": None}, {}),
    ("mistral", {"sliding_window": 8}, {"windows": (8, 8, 8)}),
    ("qwen2", {"attention_bias": False}, {"qkv_bias": True}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
     {"qkv_bias": True, "windows": (None, None, 8)}),
    ("qwen3", {"sliding_window": 8, "use_sliding_window": False}, {"qk_norm": True}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "attention_bias": True,
               "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
     {"qk_norm": True, "qkv_bias": True, "o_bias": True, "windows": (8, None, 8)}),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}, {"qk_norm": True, "windows": (8, 8, 8)}),
])  # fmt: skip
def test_a_layer_has_what_transformers_builds(tmp_path, model_type, changes, expected):
    has = {"qk_norm": False, "qkv_bias": False, "o_bias": False, "mlp_bias": False, "windows": (None,) * 3, **expected}
    shape = read(tmp_path, model_type, **changes)
    assert {name: getattr(shape, name) for name in has} == has
    with torch.device("meta"):
        layer = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)).model.layers[2]
    assert hasattr(layer.self_attn, "q_norm") == shape.qk_norm
    assert (layer.self_attn.q_proj.bias is not None) == shape.qkv_bias
    assert (layer.self_attn.o_proj.bias is not None) == shape.o_bias


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2"])
def test_rotary_embeddings_have_transformers_bits(tmp_path, model_type, kind):
    """Those that depend on the longest sequence of the batch are not for the fast path."""
    rope = {"rope_type": kind, "rope_theta": 5e5, **SCALINGS[kind]}
    shape = read(tmp_path, model_type, rope_parameters=rope, max_position_embeddings=640)
    if kind == "dynamic":
        assert shape is None
        return
    theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)).model.rotary_emb
    assert shape.inverse_frequencies == tuple(theirs.inv_freq.tolist())
    assert shape.rope_scale == theirs.attention_scaling
    assert 2 * len(shape.inverse_frequencies) == shape.head_dim == 12


@pytest.mark.parametrize(("model_type", "changes"), [
    ("llama", {"hidden_act": "gelu"}), ("mistral", {"sliding_window": 0}), ("gemma", {}),
    ("qwen2", {"layer_types": ["sliding_attention"] * 3}),  # of no width
    ("qwen3", {"layer_types": ["chunked_attention"] * 3, "head_dim": 12}),
])  # fmt: skip
def test_what_it_does_not_compute_is_left_to_transformers(tmp_path, model_type, changes):
    assert read(tmp_path, model_type, **changes) is None


def test_tensors_that_follow_from_the_config_are_passed_over(models, tmp_path):
    """Old checkpoints hold frequencies, some tied ones the head as well."""
    folder, _ = models["llama-tied"]
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, tmp_path / "model.safetensors")
    decoder = Decoder(ModelShape.read(folder), 32, torch.float32)
    found = decoder.stage(decoder.tensors(tmp_path))
    expected = decoder.stage(read_tensors(folder))
    assert all(place.equal(expected.slots()[name][0]) for name, (place, _) in found.slots().items())


@pytest.mark.parametrize("files", [1, 2], ids=["one file", "an index"])
def test_the_same_weights_under_other_names_are_passed_over(tmp_path, files):
    """Mistral's repositories hold consolidated.safetensors beside the files that transformers reads."""
    tensors = {"model.norm.weight": torch.ones(4), "lm_head.weight": torch.ones(8, 4)}
    save_file({"norm.weight": torch.zeros(4)}, tmp_path / "consolidated.safetensors")
    if files == 1:
        save_file(tensors, tmp_path / "model.safetensors")
    else:
        for number, (name, tensor) in enumerate(tensors.items()):
            save_file({name: tensor}, tmp_path / f"part-{number}.safetensors")
        where = {name: f"part-{number}.safetensors" for number, name in enumerate(tensors)}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert dict(read_tensors(tmp_path)).keys() == tensors.keys()


def test_random_weights_have_norms_of_one_and_biases_of_zero(models):
    shape = replace(ModelShape.read(models["llama"][0]), qk_norm=True)
    for name, (tensor, expected) in Weights.random(shape, torch.float32).slots().items():
        if len(expected) == 1:
            assert (tensor == (0 if name.endswith("bias") else 1)).all(), name
        else:
            assert 0.9 * shape.init_std < tensor.std() < 1.1 * shape.init_std, name
