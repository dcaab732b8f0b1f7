"""Which tensors are held in FP8, under which names; the stream there and back; checkpoints; unfit hardware."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from fp8_reference import rounded
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_fp8.directory import convert_to_plain
from miles_fp8.hardware import Device, emulated
from miles_fp8.plugin import Fp8, Fp8Options
from miles_fp8.recipe import NVFP4, RECIPES, SCALES, WEIGHTS, Held, linear, of_checkpoint, tiles
from miles_fp8.rounding import rounded as as_held
from miles_fp8.stream import apart, plain, plain_of_four_bits, quantised
from miles_local.buckets import Cutter
from miles_megatron.commands.convert import command
from miles_megatron.disk_names import split
from miles_megatron.specs import Packed, WeightMap
from safetensors.torch import load_file, save_file

from miles_core.errors import CheckpointError, ConfigError, EngineError
from miles_core.plugins.plan import prepare

L = "model.layers.3."
QUANTISED = [L + name + ".weight" for name in (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj", "mlp.experts.7.gate_proj", "mlp.experts.7.up_proj", "mlp.experts.7.down_proj",
    "mlp.shared_experts.gate_proj", "mlp.shared_expert.down_proj", "block_sparse_moe.experts.0.w2",
    "self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj",
    "linear_attn.in_proj_qkv", "linear_attn.in_proj_qkvz", "linear_attn.in_proj_z", "linear_attn.out_proj")]
QUANTISED += ["mtp.layers.0.self_attn.q_proj.weight", "model.mtp_layers.0.mlp.down_proj.weight"]
LEFT = ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", "mtp.fc.weight", L + "eh_proj.weight"]
LEFT += [L + name for name in (
    "input_layernorm.weight", "self_attn.q_norm.weight", "self_attn.q_a_layernorm.weight", "mlp.gate.weight",
    "mlp.gate.e_score_correction_bias", "mlp.shared_expert_gate.weight", "self_attn.q_proj.bias",
    "linear_attn.in_proj_ba.weight", "linear_attn.conv1d.weight", "linear_attn.A_log", "linear_attn.norm.weight")]
LEFT += [f"{tower}.{name}.weight" for tower in ("vision_tower.encoder.layers.0", "model.audio_tower.layers.0",
                                               "vision_model.transformer.layers.0") for name in ("self_attn.q_proj",
                                                                                                 "mlp.gate_proj")]


def test_the_linear_layers_of_decoders_and_nothing_else():
    assert [name for name in QUANTISED if not linear(name)] == []
    assert [name for name in LEFT if linear(name)] == []
    held = Held(WEIGHTS["blockwise"])
    assert held.quantises(QUANTISED[0], [8, 8]) and not held.quantises(QUANTISED[0], [8])


@pytest.mark.parametrize(("modules", "left"), [
    (["model.layers.3.self_attn.q_proj"], {"model.layers.3.self_attn.q_proj.weight"}),
    (["layers.3.mlp.experts"], {name for name in QUANTISED if ".3.mlp.experts." in name}),
    (["q_b_proj"], {"model.layers.3.self_attn.q_b_proj.weight"}),
    (["model.layers.33", "lm_head"], set()),
])
def test_modules_that_a_checkpoint_lists_are_left(modules, left):
    held = of_checkpoint({"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": modules},
                         Path("none"))
    assert {name for name in QUANTISED if not held.quantises(name, [8, 8])} == left


def model(seed=0, layers=2, hidden=160, wide=200):
    draw = torch.Generator().manual_seed(seed)
    shapes = {"model.embed_tokens.weight": (30, hidden), "model.norm.weight": (hidden,)}
    for i in range(layers):
        prefix = f"model.layers.{i}."
        shapes |= {f"{prefix}self_attn.{x}_proj.weight": (hidden, hidden) for x in "qkv"}
        shapes |= {f"{prefix}input_layernorm.weight": (hidden,), f"{prefix}mlp.gate.weight": (4, hidden),
                   f"{prefix}mlp.down_proj.weight": (hidden, wide), f"{prefix}self_attn.q_proj.bias": (hidden,)}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


@settings(max_examples=20, deadline=None)
@given(recipe=st.sampled_from(RECIPES), seed=st.integers(0, 99))
def test_the_stream_there_and_back_in_any_order(recipe, seed):
    weights, held = model(), Held(WEIGHTS[recipe], recipe)
    sent = list(quantised(iter(weights.items()), held))
    names = [name for name, _ in sent]
    assert names == [one for name in weights for one in ([name, held.scale(name)] if linear(name) else [name])]
    assert all(dict(sent)[name].dtype == torch.float8_e4m3fn for name in weights if linear(name))
    wanted = "weight_scale" if recipe == "tensorwise" else "weight_scale_inv"
    assert {name.rpartition(".")[2] for name in names if name.endswith(SCALES)} == {wanted}
    random.Random(seed).shuffle(sent)
    back, tiles = dict(plain(iter(sent), WEIGHTS[recipe])), WEIGHTS[recipe]
    assert back.keys() == weights.keys()
    for name, tensor in weights.items():
        expected = tensor.numpy()
        if linear(name):
            expected = rounded(expected, tiles.rows, tiles.columns, tiles.powers)
        np.testing.assert_array_equal(back[name].numpy(), expected)


IN_ONE = WeightMap(
    rules=(), heads=1, groups=1, head_dim=1, renamed=(("model.", "model.language_model."),),
    packed=(Packed("mlp.experts.gate_up_proj", ("mlp.experts.{expert}.gate_proj.weight",
                                                "mlp.experts.{expert}.up_proj.weight"), 2, transposed=True),),
)  # fmt: skip
"""As gpt-oss and Qwen3.5 have them: a layer's experts in one tensor, inside a larger model."""


@pytest.mark.parametrize("recipe", [*RECIPES, NVFP4])
def test_experts_in_one_tensor_are_fp8_each_by_itself(recipe):
    """For an engine that has them so, and for the local one, which gets them in their place and rounded."""
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    weight, held = torch.randn(2, 64, 10, generator=torch.Generator().manual_seed(0)), Held(tiles(recipe), recipe)
    parts = dict(split([(name, weight)], IN_ONE, lambda _: True))
    sent = dict(quantised(apart(iter([(name, weight)]), held, IN_ONE, whole=False), held))
    assert len(parts) == 4 and all(key in sent and held.scale(key) in sent for key in parts)
    back = dict(plain_of_four_bits(iter(sent.items())) if recipe == NVFP4 else plain(iter(sent.items()), held.tiles))
    [(same, whole)] = quantised(apart(iter([(name, weight)]), held, IN_ONE, whole=True), held)
    assert same == name and whole.shape == weight.shape
    again = dict(split([(name, whole)], IN_ONE, lambda _: True))
    for key, part in parts.items():
        assert torch.equal(back[key], as_held(part, held.tiles)) and torch.equal(again[key], back[key])
    kept = replace(held, excluded=("model.language_model.layers.0",))
    assert [one for one, _ in apart(iter([(name, weight)]), kept, IN_ONE, whole=False)] == [name]


def test_a_weight_without_its_scale_is_no_weight():
    sent = [(name, tensor) for name, tensor in quantised(iter(model().items()), Held(WEIGHTS["blockwise"]))
            if name != "model.layers.1.self_attn.k_proj.weight_scale_inv"]
    with pytest.raises(EngineError, match=r"without their scales \(got 1, such as model\.layers\.1\.self_attn\.k_proj"):
        list(plain(iter(sent)))


def test_scales_of_others_pass():
    sent = [("a.weight_packed", torch.ones(2, dtype=torch.int32)), ("a.weight_scale", torch.ones(2)),
            ("b.weight_scale", torch.ones(1)), ("b.weight", torch.ones(2, 2))]
    assert sorted(name for name, _ in plain(iter(sent))) == sorted(name for name, _ in sent)


def test_scales_stay_float32_on_their_way_to_an_engine_in_bfloat16():
    stream = quantised(iter(model().items()), Held(WEIGHTS["blockwise"]))
    buckets = Cutter(50_000, torch.float32, torch.bfloat16)(stream)
    where, dtypes = {}, {}
    for number, bucket in enumerate(buckets):
        for name, view in bucket.views():
            where[name], dtypes[name] = number, view.dtype
    assert number > 3, "there are several buckets to be torn apart among"
    for name in filter(linear, where):
        assert dtypes[name] == torch.float8_e4m3fn and dtypes[f"{name}_scale_inv"] == torch.float32
        assert where[name] == where[f"{name}_scale_inv"]
    assert dtypes["model.norm.weight"] == torch.bfloat16
    attention = {where[f"model.layers.0.self_attn.{x}_proj.weight{end}"] for x in "qkv" for end in ("", "_scale_inv")}
    assert len(attention) == 1, "what an engine keeps as one parameter, with its scales"


@pytest.fixture
def folder(tmp_path):
    source = tmp_path / "plain"
    source.mkdir()
    save_file({name: tensor.bfloat16() for name, tensor in model().items()}, source / "model.safetensors")
    said = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16",
            "num_hidden_layers": 2}
    (source / "config.json").write_text(json.dumps(said))
    return source


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_directory_in_fp8_says_what_it_holds(recipe, folder, tmp_path):
    out = tmp_path / "fp8"
    done = CliRunner().invoke(command, ["hf-to-fp8", str(folder), str(out), "--recipe", recipe])
    assert done.exit_code == 0, done.output
    assert f"8 of 16 tensors in FP8 ({recipe})" in done.output
    (file,) = out.glob("*.safetensors")
    found, before, tiles = load_file(file), load_file(folder / "model.safetensors"), WEIGHTS[recipe]
    size = sum(tensor.numel() * (1 if linear(name) else 2) for name, tensor in before.items())
    size += sum(tensor.nbytes for name, tensor in found.items() if name.endswith(SCALES))
    assert sum(tensor.nbytes for tensor in found.values()) == size and 0 < file.stat().st_size - size < 4096
    for name, tensor in before.items():
        if not linear(name):
            assert torch.equal(found[name], tensor)
            continue
        scale = found[f"{name}_scale" if recipe == "tensorwise" else f"{name}_scale_inv"]
        wide = 2.0 ** (scale.numpy().astype(np.float64) - 127) if recipe == "mxfp8" else scale.numpy()
        wide = np.atleast_2d(wide).repeat(tiles.rows or 999, 0).repeat(tiles.columns or 999, 1)
        back = found[name].float().numpy() * wide[: tensor.shape[0], : tensor.shape[1]].astype(np.float32)
        np.testing.assert_array_equal(back, rounded(tensor.float().numpy(), tiles.rows, tiles.columns, tiles.powers))
    config = json.loads((out / "config.json").read_text())
    said = config["quantization_config"]
    assert config["dtype"] == "bfloat16" and said["quant_method"] == ("mxfp8" if recipe == "mxfp8" else "fp8")
    assert said.get("weight_block_size") == {"blockwise": [128, 128], "mxfp8": [1, 32]}.get(recipe)
    assert said["modules_to_not_convert"] == [
        "model.embed_tokens", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    held = of_checkpoint(said, out)
    assert held.recipe == recipe
    assert [name for name in before if held.quantises(name, before[name].shape)] == list(filter(linear, before))


def test_experts_in_one_tensor_stay_and_are_said_to(folder, tmp_path):
    """Engines would look for their scales otherwise."""
    stored, experts = load_file(folder / "model.safetensors"), "model.layers.0.mlp.experts."
    stored |= {f"{experts}gate_up_proj": torch.ones(2, 8, 8), f"{experts}gate_up_proj_bias": torch.ones(2, 8)}
    save_file(stored, folder / "model.safetensors")
    done = CliRunner().invoke(command, ["hf-to-fp8", str(folder), str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.mlp.experts" in said["modules_to_not_convert"]
    assert "model.layers.0.mlp" not in said["modules_to_not_convert"]


def test_modules_to_keep_have_to_be_there(folder, tmp_path):
    words = ["hf-to-fp8", str(folder), str(tmp_path / "out"), "--keep"]
    failed = CliRunner().invoke(command, [*words, "self_attn.k_proj", "--keep", "self_attn.kproj"])
    assert failed.exception.code == "fp8-keep-unknown" and failed.exception.got == "self_attn.kproj"
    assert CliRunner().invoke(command, [*words, "self_attn.k_proj", "--keep", "layers.1.mlp"]).exit_code == 0
    stored = load_file(tmp_path / "out" / "model.safetensors")
    quantised_names = {name.removesuffix("_scale_inv") for name in stored if name.endswith("_scale_inv")}
    assert quantised_names == {name for name in filter(linear, model()) if "k_proj" not in name and "1.mlp" not in name}


def test_what_is_said_of_activations_stays_behind_with_the_scales(folder, tmp_path):
    """As ModelOpt publishes them: engines would take the plain weights for quantised ones."""
    CliRunner().invoke(command, ["hf-to-fp8", str(folder), str(tmp_path / "fp4"), "--recipe", NVFP4])
    stored = load_file(tmp_path / "fp4" / "model.safetensors")
    stored |= {name.replace("weight_scale_2", "input_scale"): torch.ones(()) for name in [*stored]
               if name.endswith("weight_scale_2")}
    stored["model.layers.0.self_attn.k_proj.k_scale"] = torch.ones(())
    save_file(stored, tmp_path / "fp4" / "model.safetensors")
    (tmp_path / "fp4" / "hf_quant_config.json").write_text("{}")
    (tmp_path / ".tmp-other").mkdir()
    done = CliRunner().invoke(command, ["fp8-to-hf", str(tmp_path / "fp4"), str(tmp_path / "back")])
    assert done.exit_code == 0, done.output
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == load_file(folder / "model.safetensors").keys()
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == ["config.json", "model.safetensors"]
    assert (tmp_path / ".tmp-other").exists(), "of another conversion, which is under way"


def test_scales_that_config_json_does_not_describe_are_refused(folder, tmp_path):
    """One for each row would be taken for one of all rows, again and again."""
    CliRunner().invoke(command, ["hf-to-fp8", str(folder), str(tmp_path / "fp8"), "--recipe", "tensorwise"])
    stored = load_file(tmp_path / "fp8" / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    stored[f"{name}_scale"] = torch.rand(len(stored[name]), 1)
    save_file(stored, tmp_path / "fp8" / "model.safetensors")
    with pytest.raises(CheckpointError) as raised:
        convert_to_plain(tmp_path / "fp8", tmp_path / "back")
    assert raised.value.code == "fp8-scales-differ" and not (tmp_path / "back").exists()


@pytest.mark.parametrize("recipe", [*RECIPES, NVFP4])
def test_a_directory_in_fp8_becomes_plain(recipe, folder, tmp_path):
    """Its weights are those that an engine computes with, in the dtype of config.json; the rest keeps its bits."""
    for words in (["hf-to-fp8", str(folder), str(tmp_path / "fp8"), "--recipe", recipe],
                  ["fp8-to-hf", str(tmp_path / "fp8"), str(tmp_path / "back")]):
        done = CliRunner().invoke(command, words)
        assert done.exit_code == 0, done.output
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        in_fp8 = Held(tiles(recipe), recipe).quantises(name, tensor.shape)
        expected = as_held(tensor.float(), tiles(recipe)).bfloat16() if in_fp8 else tensor
        assert torch.equal(after[name], expected), name
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads(
        (folder / "config.json").read_text())


def test_experts_in_mxfp4_beside_fp8_become_what_transformers_reads(tmp_path):
    """DeepSeek-V4's release: scales are powers of two, of tiles of 128 x 128 and, for experts, of 32 numbers."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    draw = torch.Generator().manual_seed(0)
    weights = {"layers.0.attn.wq_a": torch.randn(256, 384, generator=draw).to(torch.float8_e4m3fn),
               "layers.0.ffn.experts.0.w1": torch.randint(-128, 128, (64, 48), generator=draw, dtype=torch.int8)}
    scales = {"layers.0.attn.wq_a": (2, 3), "layers.0.ffn.experts.0.w1": (64, 3)}
    scales = {name: torch.randint(100, 130, shape, generator=draw, dtype=torch.uint8).view(torch.float8_e8m0fnu)
              for name, shape in scales.items()}
    own = {"layers.0.hc_attn_scale": torch.rand(3), "layers.0.ffn.gate.tid2eid": torch.arange(6).view(3, 2)}
    (tmp_path / "release").mkdir()
    save_file({f"{name}.weight": one for name, one in weights.items()} | own |
              {f"{name}.scale": one for name, one in scales.items()}, tmp_path / "release" / "model.safetensors")
    said = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    kept = {"model_type": "deepseek_v4", "torch_dtype": "bfloat16"}
    (tmp_path / "release" / "config.json").write_text(
        json.dumps({**kept, "expert_dtype": "fp4", "quantization_config": said}))
    convert_to_plain(tmp_path / "release", tmp_path / "plain")
    assert json.loads((tmp_path / "plain" / "config.json").read_text()) == kept
    after = load_file(tmp_path / "plain" / "model.safetensors")
    assert after.keys() == {f"{name}.weight" for name in weights} | own.keys()
    assert all(torch.equal(after[name], one) for name, one in own.items())
    for name, one in weights.items():
        expected = Fp8Dequantize(None)._dequantize_one(one, scales[name], torch.bfloat16)
        assert torch.equal(after[f"{name}.weight"], expected), name


def test_what_is_not_in_fp8_or_lacks_a_scale_is_refused(folder, tmp_path):
    with pytest.raises(CheckpointError) as caught:
        convert_to_plain(folder, tmp_path / "no")
    assert caught.value.code == "fp8-source-not-fp8"
    CliRunner().invoke(command, ["hf-to-fp8", str(folder), str(tmp_path / "fp8")])
    (file,) = (tmp_path / "fp8").glob("*.safetensors")
    tensors = load_file(file)
    del tensors["model.layers.0.mlp.down_proj.weight_scale_inv"]
    save_file(tensors, file)
    with pytest.raises(CheckpointError) as caught:
        convert_to_plain(tmp_path / "fp8", tmp_path / "no")
    assert caught.value.code == "fp8-weight-without-scale" and "down_proj.weight_scale_inv" in caught.value.got
    assert not (tmp_path / "no").exists()


def test_weights_that_lie_there_twice_are_converted_once(folder, tmp_path):
    """Mistral's repositories have consolidated.safetensors beside the files that the index names."""
    save_file({"layers.0.attention.wq.weight": torch.ones(8, 8)}, folder / "consolidated.safetensors")
    done = CliRunner().invoke(command, ["hf-to-fp8", str(folder), str(tmp_path / "fp8")])
    assert done.exit_code == 0 and "8 of 16 tensors" in done.output, done.output
    (file,) = (tmp_path / "fp8").glob("*.safetensors")
    assert "layers.0.attention.wq.weight" not in load_file(file)


def test_minimaxs_word_for_the_format_is_read():
    stated = {"quant_method": "fp8", "fmt": "float8_e4m3fn", "activation_scheme": "dynamic",
              "weight_block_size": [128, 128]}
    assert of_checkpoint(stated, Path("none")).tiles == WEIGHTS["blockwise"]


def test_layers_and_modules_can_be_left_and_the_engines_checkpoint_is_followed(folder, tmp_path):
    out = tmp_path / "fp8"
    done = CliRunner().invoke(command, ["hf-to-fp8", str(folder), str(out), "--first-layers", "1"])
    assert done.exit_code == 0 and "4 of 16" in done.output, done.output
    said = json.loads((out / "config.json").read_text())["quantization_config"]
    held = of_checkpoint({**said, "modules_to_not_convert": []}, out)  # the files say it, whatever the list does
    assert {name.split(".")[2] for name in model() if held.quantises(name, [8, 8])} == {"1"}
    again = CliRunner().invoke(command, ["hf-to-fp8", str(out), str(tmp_path / "twice")])
    assert again.exit_code != 0 and "quantised already" in str(again.exception)
    save_file({"x": torch.ones(2)}, out / next(out.glob("*.safetensors")).name)
    with pytest.raises(CheckpointError, match="no tensor has a scale"):
        of_checkpoint(said, out)


@pytest.mark.parametrize(("said", "got"), [
    ({"activation_scheme": "static"}, "static"), ({"fmt": "e5m2"}, "e5m2"),
    ({"quant_method": "modelopt", "quant_algo": "FP8"}, "FP8")])  # ModelOpt's has scales of activations
def test_other_kinds_of_fp8_are_refused(said, got, tmp_path):
    with pytest.raises(ConfigError, match=f"does not write .*{got}"):
        of_checkpoint({"quant_method": "fp8", **said}, tmp_path)


H200, L40, A100 = Device("H200", (9, 0), True), Device("L40S", (8, 9), True), Device("A100", (8, 0), True)


@pytest.mark.parametrize(("device", "fields", "bf16", "sentence"), [
    (H200, {"fp8_recipe": "mxfp8"}, True, r"mxfp8 needs a GPU of compute capability 10\.0 \(got H200, 9\.0\)\. "
     r"Fix: write --fp8-recipe blockwise"),
    (L40, {"fp8_recipe": "blockwise"}, True, r"blockwise needs .* 9\.0 \(got L40S, 8\.9\)\. Fix: write .* tens"),
    (A100, {"fp8_recipe": "tensorwise"}, True, r"tensorwise needs .* 8\.9 \(got A100, 8\.0.*Fix: train in bfloat16"),
    (H200, {"fp8_recipe": "blockwise"}, False, "FP8 kernels train in bfloat16"),
    (Device("H200", (9, 0), False), {"fp8_recipe": "blockwise"}, True, "needs Transformer Engine, which is not inst"),
    (Device(), {"fp8_recipe": "delayed"}, False, "'delayed'"),
    (H200, {"fp8_recipe": "blockwise", "fp8_param": True}, True, "cannot be streamed to engines"),
])
def test_what_cannot_run_is_named(device, fields, bf16, sentence):
    with pytest.raises(ConfigError, match=sentence):
        emulated(device, fields, bf16)


def test_where_it_is_emulated():
    assert emulated(Device(), {"fp8_recipe": "mxfp8"}, False)
    assert emulated(H200, {"fp8_recipe": "mxfp8", "transformer_impl": "local"}, False)
    assert not emulated(H200, {"fp8_recipe": "blockwise"}, True)
    assert not emulated(Device("B200", (10, 0), True), {"fp8_recipe": "mxfp8"}, True)


def test_the_kernels_fields_go_to_the_kernels_alone():
    given = {"fp8": "hybrid", "fp8_recipe": "blockwise", "moe_router_padding_for_fp8": True, "num_layers": 2}
    plan = prepare(None, ["--hf-checkpoint", "x", "--prompt-data", "y", "--rollout-batch-size", "2", "--num-rollout",
                          "1", "--rm-type", "math", "--plugin", "fp8"])
    assert Fp8(Fp8Options(), plan.config).transformer_config(dict(given)) == {"num_layers": 2}
    assert Fp8(Fp8Options(), plan.config).transformer_config({"num_layers": 2}) == {"num_layers": 2}


def test_sglang_is_sent_no_weights_with_one_scale_each(folder, tmp_path):
    out = tmp_path / "fp8"
    CliRunner().invoke(command, ["hf-to-fp8", str(folder), str(out), "--recipe", "tensorwise"])
    flags = ["--hf-checkpoint", str(out), "--ref-load", "plain", "--prompt-data", "y",
             "--rollout-batch-size", "2", "--num-rollout", "1", "--rm-type", "math"]
    with pytest.raises(ConfigError, match="cannot load new ones"):
        prepare(None, [*flags, "--engine", "sglang"])
    assert list(Fp8(Fp8Options(), prepare(None, flags).config).export_weights(iter(()))) == []
