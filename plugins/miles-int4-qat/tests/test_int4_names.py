"""Which weights are int4, what config.json says of it, and what readers make of that."""

from __future__ import annotations

import json
import re

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from miles_int4_qat import names, quantise, stream
from miles_int4_qat.plugin import Int4Qat, Int4QatOptions
from miles_megatron.disk_names import split
from miles_megatron.specs import Packed, Rule, WeightMap
from safetensors.torch import save_file

from miles_core.config.load import with_values
from miles_core.config.tables import RunConfig
from miles_core.errors import CheckpointError, ConfigError, EngineError

LAYER = "model.layers.{}."
NOTHING_PACKED = WeightMap(rules=(), heads=1, groups=1, head_dim=1)
ATTENTION = [f"self_attn.{one}_proj.weight" for one in "qkvo"]
NORMS = ["input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.q_norm.weight"]
DENSE = [f"mlp.{one}_proj.weight" for one in ("gate", "up", "down")]
EXPERTS = [f"mlp.experts.{i}.{one}_proj.weight" for i in (0, 11) for one in ("gate", "up", "down")]
SHARED = [f"mlp.shared_experts.{one}_proj.weight" for one in ("gate", "up", "down")]
ROUTER = ["mlp.gate.weight", "mlp.gate.e_score_correction_bias", "mlp.shared_expert_gate.weight"]
OUTSIDE = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]


def model(*layers):
    return [*OUTSIDE, *(LAYER.format(i) + name for i, layer in enumerate(layers)
                        for name in (*ATTENTION, *NORMS, *layer))]


QWEN = model(DENSE, DENSE)
TOWERS = {
    "model.visual.": ["blocks.0.attn.qkv", "merger.linear_fc1", "pos_embed"],
    "vision_tower.": ["encoder.layers.0.self_attn.q_proj", "encoder.layers.0.mlp.fc1", "head.attention.out_proj"],
    "multi_modal_projector.": ["linear_1"],
    "model.embed_vision.": ["embedding_projection"],
}
SEES = [name.replace("model.", "model.language_model.", 1) for name in QWEN] + [
    f"{tower}{name}.weight" for tower, inside in TOWERS.items() for name in inside]
FUSED = model([*(f"mlp.experts.{one}" for one in ("gate_up_proj", "down_proj", "down_proj_bias")), "mlp.router.weight"])
MIXED = model(DENSE, *[EXPERTS + SHARED + ROUTER] * 12)  # as DeepSeek-V3: the first layer is dense
MINIMAX = model([f"block_sparse_moe.experts.{i}.w{k}.weight" for i in (0, 1) for k in (1, 2, 3)])


def test_what_is_rounded():
    experts = {name for name in MIXED if ".experts." in name}
    assert names.chosen(MIXED, "auto") == names.chosen(MIXED, "experts") == experts and len(experts) == 72
    linears = names.chosen(MIXED, "linears")
    assert linears - experts == {name for name in MIXED if re.search(r"(self_attn\.[qkvo]|mlp\.\w+|shared_experts\.\w+)"
                                                                     r"_proj\.weight", name)}
    assert names.chosen(QWEN, "auto") == names.chosen(QWEN, "linears") and len(names.chosen(QWEN, "auto")) == 14
    assert not names.chosen(QWEN, "experts")
    assert len(names.chosen(MINIMAX, "auto")) == 6
    assert len(names.chosen(SEES, "linears")) == 14, "what sees is no decoder"
    assert not names.chosen(FUSED, "auto") and len(names.chosen(FUSED, "linears")) == 4


@pytest.mark.parametrize(("tensors", "targets"), [(QWEN, "linears"), (MIXED, "experts"), (MIXED, "linears"),
                                                  (MINIMAX, "experts"), (SEES, "linears"), (FUSED, "linears")])
def test_the_ignore_list_tells_all_others_from_the_packed_ones(tensors, targets):
    """As compressed-tensors and SGLang match it, also by the names under which an engine fuses projections."""
    packed = names.chosen(tensors, targets)
    said = names.quantization_config(tensors, packed, 32)
    assert QuantizationConfig.model_validate(said).config_groups["group_0"].weights.group_size == 32
    expressions = [one for one in said["ignore"] if one.startswith("re:")]
    assert len(said["ignore"]) <= 8, said["ignore"]

    def ignored(module):
        return module in said["ignore"] or any(re.match(one[3:], module) for one in expressions)

    for name in tensors:
        if not name.endswith(".weight") or re.search("norm|embed_tokens|pos_embed", name):  # no linear layers
            continue
        assert ignored(name.removesuffix(".weight")) == (name not in packed), name
    if tensors is FUSED:
        assert ignored("model.layers.0.mlp.experts")
    if tensors is SEES:  # what transformers and engines call the modules
        assert ignored("model.vision_tower.encoder.layers.0.mlp.fc1") and ignored("visual.blocks.0.attn.qkv")
        assert not ignored("model.layers.0.mlp.gate_proj")
    for fused, one in (("self_attn.qkv_proj", "self_attn.q_proj"), ("mlp.gate_up_proj", "mlp.gate_proj")):
        if (name := f"{LAYER.format(0)}{one}.weight") in tensors:
            assert ignored(LAYER.format(0) + fused) == (name not in packed)


def test_only_some_layers_are_named_one_by_one():
    packed = {name for name in QWEN if ".1." in name and "down_proj" in name}
    ignore = names.ignored(QWEN, packed)
    assert any(re.match(one[3:], "model.layers.0.mlp.down_proj") for one in ignore if one.startswith("re:"))
    assert not any(re.match(one[3:], "model.layers.1.mlp.down_proj") for one in ignore if one.startswith("re:"))


@pytest.fixture
def folder(tmp_path):
    """(quantization_config, tensors) -> a folder that says so."""
    def write(said, tensors=None):
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said} if said else {}))
        if tensors:
            save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path

    return write


def test_what_config_json_says_is_read_back(folder):
    said = names.quantization_config(MIXED, names.chosen(MIXED, "experts"), 128)
    there = names.stated(folder(said))
    assert there.group_size == 128
    assert names.packed_names(folder(said), there, MIXED) == names.chosen(MIXED, "experts"), "no files: by the list"
    assert names.stated(folder(None)) is None


@pytest.mark.parametrize("change", [
    {"quant_method": "fp8"}, {"format": "int-quantized"}, {"num_bits": 8}, {"symmetric": False},
    {"strategy": "channel"}, {"actorder": "group"}, {"input_activations": {"num_bits": 8}},
])  # fmt: skip
def test_other_quantisation_is_refused(folder, change):
    said = names.quantization_config(QWEN, names.chosen(QWEN, "linears"), 32)
    group = said["config_groups"]["group_0"]
    for key, value in change.items():
        where = said if key in said else group if key in group else group["weights"]
        where[key] = value
    with pytest.raises(ConfigError, match=r"config\.json: the checkpoint's weights are quantised in a way that"):
        names.stated(folder(said))


def test_files_decide_and_have_to_agree_on_the_group_size(folder):
    weight = "model.layers.0.mlp.down_proj.weight"
    tensors = dict(stream.packed([(weight, torch.randn(4, 128)), ("model.norm.weight", torch.ones(4))], {weight}, 64,
                                 None))
    right, wrong = (names.quantization_config(QWEN, {weight}, size) for size in (64, 128))
    there = folder(right, tensors)
    assert names.packed_names(there, names.stated(there), QWEN) == {weight}
    there = folder(wrong)
    with pytest.raises(CheckpointError, match=r"says groups of 128 \(got .*down_proj\.weight: 2 scales for 128 w"):
        names.packed_names(there, names.stated(there), QWEN)


def test_the_stream_comes_back_in_any_order_and_says_what_is_missing():
    weight = torch.randn(4, 64)
    sent = list(stream.packed([("a.weight", weight), ("norm.weight", weight[0])], {"a.weight"}, 32, torch.bfloat16))
    assert [name for name, _ in sent] == ["a.weight_packed", "a.weight_scale", "a.weight_shape", "norm.weight"]
    back = dict(stream.unpacked(sent[::-1]))
    assert torch.equal(back["norm.weight"], weight[0])
    plain = dict(stream.rounded([("a.weight", weight)], NOTHING_PACKED, {"a.weight"}, 32, torch.bfloat16))
    assert torch.equal(back["a.weight"].float(), plain["a.weight"]) and plain["a.weight"].dtype == torch.float32
    with pytest.raises(EngineError, match=r"incomplete \(got a\.weight: packed, shape and no scale\)"):
        list(stream.unpacked([sent[0], sent[2]]))
    with pytest.raises(EngineError, match=r"a\.weight"):
        list(stream.unpacked([("a.weight_packed", sent[0][1][:2]), *sent[1:]]))


def test_a_width_is_refused_with_the_sizes_that_fit():
    names.check_width("w", 128, 64)
    with pytest.raises(ConfigError, match=r"groups of 128 do not divide the input axis of w \(got 96\).*groups of 32 "):
        names.check_width("w", 96, 128)
    with pytest.raises(ConfigError, match=r"\(got 48 on each of 2 tensor-parallel ranks\).*fewer tensor-parallel"):
        names.check_width("w", 48, 32, 2)


EACH = "model.layers.0.mlp.experts.{expert}."
IN_ONE = WeightMap(
    rules=(Rule("decoder.layers.0.mlp.experts.local_experts.{expert}.linear_fc1.weight",
                (EACH + "gate_proj.weight", EACH + "up_proj.weight"), "rows", (0,), 2),),
    heads=1, groups=1, head_dim=1, renamed=(("model.", "model.language_model."),),
    packed=(Packed("mlp.experts.gate_up_proj", ("mlp.experts.{expert}.gate_proj.weight",
                                                "mlp.experts.{expert}.up_proj.weight"), 2, transposed=True),),
)  # fmt: skip
"""As gpt-oss and Qwen3.5 have them: a layer's experts in one tensor, inside a larger model."""


@pytest.mark.parametrize("stored", [False, True])
def test_experts_in_one_tensor_are_rounded_or_packed_each_by_itself(tmp_path, stored):
    """Without it the engine would sample with weights that the trainer does not compute with."""
    said = {"quantization_config": names.quantization_config([], [], 32)} if stored else {}
    (tmp_path / "config.json").write_text(json.dumps(said))
    plugin = Int4Qat(Int4QatOptions(), with_values(RunConfig(), "test", checkpoint__hf_checkpoint=str(tmp_path)))
    plugin.weight_map(IN_ONE, "actor")
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    weight = torch.randn(2, 64, 10, generator=torch.Generator().manual_seed(0))  # [experts, inputs, outputs]
    sent = dict(plugin.export_weights(iter([(name, weight)])))
    parts = dict(split([(name, weight)], IN_ONE, lambda _: True))
    assert len(parts) == 4 and all(part.shape == (5, 64) for part in parts.values())
    plain = {key: quantise.rounded(part, 32, plugin._scale_dtype) for key, part in parts.items()}
    if stored:
        assert sent.keys() == {f"{key}_{part}" for key in parts for part in names.PARTS}
        back = dict(stream.unpacked(sent.items()))
        assert all(torch.equal(back[key].float(), plain[key]) for key in parts)
    else:
        again = dict(split(sent.items(), IN_ONE, lambda _: True))
        assert sent[name].shape == weight.shape and all(torch.equal(again[key], plain[key]) for key in parts)
