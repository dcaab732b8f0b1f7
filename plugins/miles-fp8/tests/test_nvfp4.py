"""NVFP4 in emulation: numbers against the format's definition, names, bytes, directories; who has no kernels."""

import json
import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from fp8_reference import E4M3, nearest
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_fp8 import nvfp4
from miles_fp8.hardware import Device, emulated
from miles_fp8.plugin import Fp8, Fp8Options
from miles_fp8.recipe import FOUR_BITS, NVFP4, Held, linear, of_checkpoint
from miles_fp8.stream import plain_of_four_bits, quantised
from miles_megatron.commands.convert import command
from safetensors.torch import load_file, save_file

from miles_core.errors import ConfigError, EngineError
from miles_core.plugins.plan import prepare

RUN = ["--hf-checkpoint", "x", "--prompt-data", "y", "--rollout-batch-size", "2", "--num-rollout", "1", "--rm-type",
       "math", "--plugin", "fp8", "--fp8.recipe", "nvfp4"]  # fmt: skip


def e2m1(code: int) -> float:
    """What four bits stand for: a sign, two of exponent with bias 1, one of mantissa, subnormal below."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -size if code >> 3 else size


def reference(x: np.ndarray) -> np.ndarray:
    """x [R, C] as NVFP4 holds it, number by number: scales first, then the nearest of sixteen values."""
    whole = np.float32(np.abs(x).max()) / np.float32(6 * 448) or np.float32(1)
    found = np.empty_like(x)
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], 16):
            block = x[row, start : start + 16]
            scale = np.abs(block).max() / np.float32(6) / whole
            scale = np.float32(nearest(np.array([np.clip(scale, 2.0**-9, 448)]), E4M3)[0] if scale else 1)
            for i, number in enumerate(block / np.float32(scale * whole)):
                distances = [(abs(abs(number) - e2m1(code)), code & 1, code) for code in range(8)]
                found[row, start + i] = np.copysign(e2m1(min(distances)[2]), number) * np.float32(scale * whole)
    return found


def test_the_sixteen_values_and_where_they_meet():
    assert tuple(e2m1(code) for code in range(8)) == nvfp4.VALUES
    halfway = [(low + high) / 2 for low, high in pairwise(nvfp4.VALUES)]
    codes = nvfp4._nearest(torch.tensor([*halfway, 6.0, 100.0]))
    assert codes.tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 7], "the even one of two, and nothing beyond the largest"


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 9), blocks=st.integers(1, 5), seed=st.integers(0, 999), zeros=st.booleans())
def test_numbers_are_the_definition(rows, blocks, seed, zeros):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 16 * blocks, generator=draw)
    x *= torch.exp2(torch.randint(-8, 8, (rows, 1), generator=draw).float())
    if zeros:
        x[: rows // 2 + 1] = 0
    packed, scale, whole = nvfp4.quantise(x)
    assert packed.dtype == torch.uint8 and packed.shape == (rows, 8 * blocks)
    assert scale.dtype == torch.float8_e4m3fn and scale.shape == (rows, blocks)
    assert whole.dtype == torch.float32 and whole.shape == ()
    back = nvfp4.dequantise(packed, scale, whole)
    np.testing.assert_array_equal(back.numpy(), reference(x.numpy()))
    low = torch.tensor([e2m1(int(byte) & 15) for byte in packed.flatten()])
    first = back[:, 0::2].flatten() / (scale.float() * whole).repeat_interleave(8, 1).flatten()
    torch.testing.assert_close(first, low)


def test_the_largest_number_is_kept_and_what_is_no_number_stays_visible():
    x = torch.linspace(-1, 1, 64).view(2, 32)
    assert nvfp4.rounded(x).abs().max() == pytest.approx(1.0, rel=1e-6)
    for wrong in (float("nan"), float("inf")):
        x[1, 3] = wrong
        assert nvfp4.rounded(x)[1, 3].isnan()
    assert nvfp4.rounded(torch.randn(3, 5, 20)).shape == (3, 5, 20), "blocks are filled up"


def weights():
    draw = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (30, 32), "model.norm.weight": (32,),
              "model.layers.0.mlp.gate.weight": (4, 32), "model.layers.0.mlp.down_proj.weight": (32, 40)}
    shapes |= {f"model.layers.0.self_attn.{one}_proj.weight": (32, 32) for one in "qkvo"}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


TAKEN = {f"model.layers.0.self_attn.{one}_proj.weight" for one in "qkvo"}
"""A row of 40 is no whole number of blocks."""


def test_the_stream_there_and_back_in_any_order():
    before, held = weights(), Held(FOUR_BITS, NVFP4)
    sent = list(quantised(iter(before.items()), held))
    names = {name for name, _ in sent}
    assert names == before.keys() | {f"{name}_scale{end}" for name in TAKEN for end in ("", "_2")}
    assert all(vars(tensor).get("keeps_dtype") for name, tensor in sent if name.startswith(tuple(TAKEN)))
    random.Random(0).shuffle(sent)
    back = dict(plain_of_four_bits(iter(sent)))
    assert back.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(back[name], nvfp4.rounded(tensor) if name in TAKEN else tensor), name
    with pytest.raises(EngineError, match="without their scales"):
        list(plain_of_four_bits(iter(sent[:-1]) if sent[-1][0].startswith(tuple(TAKEN)) else iter(
            [one for one in sent if not one[0].endswith("_scale_2")])))


def test_a_directory_says_what_it_holds(tmp_path):
    source, out = tmp_path / "plain", tmp_path / "out"
    source.mkdir()
    save_file({name: tensor.bfloat16() for name, tensor in weights().items()}, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 1}))
    done = CliRunner().invoke(command, ["hf-to-fp8", str(source), str(out), "--recipe", "nvfp4"])
    assert done.exit_code == 0 and "4 of 8 tensors in NVFP4" in done.output, done.output
    found, before = load_file(out / "model.safetensors"), load_file(source / "model.safetensors")
    for name, tensor in before.items():
        if name not in TAKEN:
            assert torch.equal(found[name], tensor)
            continue
        parts = found[name], found[f"{name}_scale"], found[f"{name}_scale_2"]
        assert sum(part.nbytes for part in parts) == 32 * 32 // 2 + 32 * 32 // 16 + 4
        assert torch.equal(nvfp4.dequantise(*parts, torch.bfloat16), nvfp4.rounded(tensor))
    said = json.loads((out / "config.json").read_text())["quantization_config"]
    assert (said["quant_method"], said["quant_algo"], said["group_size"]) == ("modelopt", "NVFP4", 16)
    assert said["ignore"] == ["model.embed_tokens", "model.layers.0.mlp.down_proj", "model.layers.0.mlp.gate"]
    held = of_checkpoint(said, out)
    assert held.recipe == NVFP4 and {name for name in before if held.quantises(name, before[name].shape)} == TAKEN
    assert all(linear(name) for name in TAKEN)


def test_its_kernels_are_blackwells_alone():
    """On Hopper the trainer's start refuses it by name; on a CPU it is emulated."""
    recipe = {"fp8": "e4m3", "fp8_recipe": NVFP4}
    with pytest.raises(ConfigError, match=r"nvfp4 needs a GPU of compute capability 10\.0 \(got H200, 9\.0\)"):
        emulated(Device("H200", (9, 0), True), recipe, True)
    assert emulated(Device(), recipe, False) and not emulated(Device("B200", (10, 0), True), recipe, True)


def test_a_run_asks_for_it_by_one_option(monkeypatch):
    plan = prepare(None, RUN)
    assert plan.config.surface("megatron")["fp8_recipe"] == NVFP4
    given = {"fp8": "e4m3", "fp8_recipe": NVFP4, "num_layers": 2}
    assert Fp8(Fp8Options(recipe=NVFP4), plan.config).transformer_config(dict(given)) == {"num_layers": 2}
    monkeypatch.setattr(Device, "here", classmethod(lambda cls: Device("B200", (10, 0), True)))
    config = plan.config.__class__(perf=plan.config.perf.__class__(bf16=True))
    assert Fp8(Fp8Options(recipe=NVFP4), config).transformer_config(dict(given)) == {
        "fp4": "e2m1", "fp4_recipe": NVFP4, "num_layers": 2}
