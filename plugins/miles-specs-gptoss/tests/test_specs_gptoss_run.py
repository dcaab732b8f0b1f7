"""gpt-oss in whole runs, in MXFP4 as it is released, and packed beside other sequences."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from miles_megatron import cpu, model, weights
from miles_megatron.mxfp4 import dequantised
from miles_megatron.packed_layout import packed_rows
from miles_megatron.testing.checkpoints import tensors
from miles_megatron.testing.demo import demo_run
from miles_megatron.testing.parity import LENGTHS, cases, family_of, random_model
from safetensors.torch import save_file

from miles_core.errors import ConfigError

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "arithmetic"
CASES = cases(Path(__file__).with_name("parity.toml"))
WORDS = {"vocab_size": 264, "num_hidden_layers": 2, "pad_token_id": 256, "bos_token_id": None, "eos_token_id": 258}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("gpt_oss")
    config = {**CASES[0].config, **WORDS, "hidden_size": 64, "intermediate_size": 64}
    random_model(replace(CASES[0], config=config)).save_pretrained(found)
    for file in (EXAMPLES / "tiny-qwen3").glob("*token*"):
        shutil.copy(file, found)
    return found


@pytest.fixture
def rounded(folder, tmp_path):
    """The same with random numbers of MXFP4 for the experts' matrices."""
    target, draw = tmp_path / "mxfp4", torch.Generator().manual_seed(0)
    shutil.copytree(folder, target)
    whole = {}
    for name, tensor in tensors(folder).items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            whole[name] = tensor.bfloat16()
            continue
        experts, inputs, outputs = tensor.shape
        shape = (experts, outputs, inputs // 32)
        whole[name + "_blocks"] = torch.randint(256, (*shape, 16), generator=draw, dtype=torch.uint8)
        whole[name + "_scales"] = torch.randint(118, 126, shape, generator=draw, dtype=torch.uint8)
    save_file(whole, target / "model.safetensors", {"format": "pt"})
    path = target / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}))
    (target / "hf_quant_config.json").write_text("{}")  # ModelOpt says it a second time
    return target


def test_mxfp4_is_what_transformers_reads():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    draw = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (3, 5, 4, 16), generator=draw, dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 5, 4), generator=draw, dtype=torch.uint8)
    assert torch.equal(dequantised(blocks, scales).mT, convert_moe_packed_tensors(blocks, scales))


def test_a_release_becomes_plain_by_conversion(rounded, convert, tmp_path):
    """To torch_dist and back: the values of MXFP4, under the names and in the order of a plain checkpoint."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    convert("hf-to-dist", rounded, tmp_path / "dist")
    convert("dist-to-hf", tmp_path / "dist", tmp_path / "back", "--hf-checkpoint", rounded)
    before, after = tensors(rounded), tensors(tmp_path / "back")
    assert after.keys() == {name.removesuffix("_blocks") for name in before if not name.endswith("_scales")}
    for name, tensor in after.items():
        wanted = before[name] if name in before else convert_moe_packed_tensors(
            before[name + "_blocks"], before[name + "_scales"])
        assert torch.equal(tensor, wanted), name
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    assert not (tmp_path / "back" / "hf_quant_config.json").exists()


@pytest.mark.full
def test_a_run_needs_nothing_but_the_checkpoint(folder, tmp_path):
    """The engine decodes what the trainer trains; the routes of its experts are replayed; every part of it moves."""
    steps, _ = demo_run(ROOT, folder, tmp_path, "--use-rollout-routing-replay", "--entropy-coef", "0.01")
    assert len(steps) == 2
    assert all(one["train/train_rollout_logprob_abs_diff_max"] <= 2e-5 for one in steps)
    before, after = tensors(folder), tensors(tmp_path / "run" / "hf")
    assert before.keys() == after.keys()
    for name in ("self_attn.sinks", "self_attn.o_proj.bias", "mlp.router.bias", "mlp.experts.gate_up_proj",
                 "mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias"):
        assert not torch.equal(before[f"model.layers.0.{name}"], after[f"model.layers.0.{name}"]), name


@torch.no_grad()
def test_packed_sequences_leak_nothing():
    """A sequence has the same hidden states alone and beside others, one of which changes.

    To rounding: an expert multiplies the tokens of all that chose it at once.
    """
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        cpu.initialize()
    hf = random_model(CASES[0]).config
    spec = family_of("gpt_oss", hf).model_spec(hf)
    built = model.build(model.transformer_config(spec), spec).eval()
    for name, parameter in weights.global_parameters(built).items():
        if name.endswith("sinks"):
            parameter.normal_()
    draw = torch.Generator().manual_seed(0)
    sequences = [torch.randint(3, 96, (length,), generator=draw) for length in LENGTHS]

    def hidden(some):
        bounds = torch.tensor([0, *map(len, some)]).cumsum(0)
        return built(torch.cat(some)[None], None, None, packed_seq_params=packed_rows(bounds))[:, 0].split(
            [*map(len, some)])

    before = hidden(sequences)
    changed = hidden([sequences[0], (sequences[1] + 1) % 90 + 3, *sequences[2:]])
    same = [torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(before, changed, strict=True)]
    assert same == [i != 1 for i in range(len(sequences))]
    for alone, beside in zip(sequences, before, strict=True):
        torch.testing.assert_close(hidden([alone])[0], beside, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("change", [{"attention_bias": False}, {"swiglu_alpha": 1.0}, {"hidden_act": "gelu"}],
                         ids=lambda change: next(iter(change)))
def test_variants_that_are_not_modelled_are_refused(change):
    from miles_specs_gptoss.families import gpt_oss
    from transformers import AutoConfig

    with pytest.raises(ConfigError, match="gpt_oss with .*(attention_bias|swiglu_alpha|hidden_act)"):
        gpt_oss(AutoConfig.for_model("gpt_oss", **{**CASES[0].config, **change}))
