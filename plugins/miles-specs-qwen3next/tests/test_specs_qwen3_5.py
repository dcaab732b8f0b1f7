"""Qwen3.5 as it is released: the text model inside, experts in two tensors a layer, a tower, a drafting layer."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from miles_megatron.testing.checkpoints import packed_experts, tensors
from miles_megatron.testing.demo import demo_run
from miles_megatron.testing.parity import TINY, Case, cases, random_model
from miles_megatron.testing.ranks import batches
from safetensors.torch import save_file

from miles_core.errors import ConfigError
from miles_core.plugins.plan import prepare

pytestmark = pytest.mark.xdist_group("specs-qwen3next")

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "arithmetic"
VOCAB = 264
WORDS = {"vocab_size": VOCAB, "num_hidden_layers": 2, "pad_token_id": 256, "bos_token_id": None, "eos_token_id": 258,
         "layer_types": ["linear_attention", "full_attention"]}
RUN = ("--prompt-data", "data/none.jsonl", "--num-rollout", 2, "--rollout-batch-size", 4, "--n-samples-per-prompt", 4,
       "--rollout-max-response-len", 41, "--no-bf16", "--use-dynamic-batch-size", "--max-tokens-per-gpu", 96,
       "--trainer-host", "process", "--disable-rewards-normalization", "--lr", 1e-3)  # fmt: skip
CASES = {case.family: case for case in cases(Path(__file__).with_name("parity.toml"))}
INSIDE = "model.language_model."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random checkpoint, its tensors as the releases have them."""
    found, case = tmp_path_factory.mktemp("qwen3_5_moe"), CASES["qwen3_5_moe"]
    text = {**case.config["text_config"], **WORDS, "mtp_num_hidden_layers": 1}
    random_model(Case("qwen3_5_moe", "tiny", {**case.config, "text_config": text})).save_pretrained(found)
    whole = packed_experts(tensors(found))
    draw, hidden = torch.Generator().manual_seed(0), TINY["hidden_size"]
    last = INSIDE + "layers.1."
    whole |= {name.replace(last, "mtp.layers.0."): tensor + 0.02 * torch.randn(tensor.shape, generator=draw)
              for name, tensor in whole.items() if name.startswith(last)}
    whole |= {f"mtp.{name}.weight": 0.1 * torch.randn(hidden, generator=draw)
              for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    whole["mtp.fc.weight"] = 0.1 * torch.randn(hidden, 2 * hidden, generator=draw)
    save_file(whole, found / "model.safetensors", {"format": "pt"})
    for file in (EXAMPLES / "tiny-qwen3").glob("*token*"):
        shutil.copy(file, found)
    return found


def plan(folder, *flags):
    return prepare(None, ["--hf-checkpoint", str(folder), *map(str, (*RUN, *flags))])


@pytest.mark.full
def test_a_run_trains_the_text_model_and_carries_the_tower(folder, tmp_path):
    """Two rollouts: the engine decodes what the trainer trains; the export has the checkpoint's names and its tower."""
    steps, _ = demo_run(ROOT, folder, tmp_path, "--use-rollout-routing-replay", "--entropy-coef", "0.01")
    assert len(steps) == 2
    assert all(one["train/train_rollout_logprob_abs_diff_max"] <= 2e-5 for one in steps)
    before, after = tensors(folder), tensors(tmp_path / "run" / "hf")
    assert after.keys() == {name for name in before if not name.startswith("mtp.")}
    keys = json.loads((tmp_path / "run" / "hf" / "config.json").read_text())
    assert keys["model_type"] == "qwen3_5_moe" and keys["text_config"]["mtp_num_hidden_layers"] == 0
    tower = [name for name in before if name.startswith("model.visual.")]
    assert tower and all(torch.equal(before[name], after[name]) for name in tower)
    for name in ("linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_a.weight", "mlp.experts.gate_up_proj"):
        assert not torch.equal(before[f"{INSIDE}layers.0.{name}"], after[f"{INSIDE}layers.0.{name}"]), name


@pytest.mark.full
def test_adapters_are_merged_under_the_names_of_the_files(folder, tmp_path):
    """Of every linear layer: projections of a delta net and packed experts too. The engine computes what trains."""
    steps, _ = demo_run(ROOT, folder, tmp_path, "--plugin", "lora", "--lora-rank", "4", "--lora-alpha", "8",
                        "--target-modules", "all-linear", "--lr", "0.01", "--entropy-coef", "0.01")
    assert len(steps) == 2
    assert all(one["train/train_rollout_logprob_abs_diff_max"] <= 2e-5 for one in steps)
    before, after = tensors(folder), tensors(tmp_path / "run" / "hf")
    assert after.keys() == {name for name in before if not name.startswith("mtp.")}
    for name in ("layers.0.linear_attn.in_proj_qkv.weight", "layers.0.linear_attn.in_proj_z.weight",
                 "layers.1.self_attn.q_proj.weight", "layers.0.mlp.experts.gate_up_proj"):
        assert not torch.equal(before[INSIDE + name], after[INSIDE + name]), name
    assert torch.equal(before[INSIDE + "norm.weight"], after[INSIDE + "norm.weight"])


@pytest.mark.full
def test_experts_of_two_ranks_come_out_as_the_files_have_them(folder, one, two):
    """With the plugin mtp its layer too; the tower is no part of the stream."""
    flags = ("--plugin", "mtp", "--actor-num-gpus-per-node", 2, "--expert-model-parallel-size", 2)
    streamed = two.train(plan(folder, *flags), [])["weights"]
    before = {name: tensor.numpy() for name, tensor in tensors(folder).items() if not name.startswith("model.visual.")}
    assert streamed.keys() == before.keys()
    assert all(np.array_equal(streamed[name], before[name]) for name in before)
    kept = one.train(plan(folder, "--plugin", "mtp", "--enable-mtp-training"), batches(1, vocab=VOCAB))
    assert 0 < kept["steps"][0]["train/mtp_loss"] < 20
    assert not np.array_equal(kept["weights"]["mtp.layers.0.mlp.experts.gate_up_proj"],
                              before["mtp.layers.0.mlp.experts.gate_up_proj"])


@pytest.mark.full
def test_a_resume_under_another_layout_goes_on_from_the_same_bits(folder, one, two, tmp_path):
    flags = ("--actor-num-gpus-per-node", 2, "--tensor-model-parallel-size", 2, "--sequence-parallel")
    whole = two.train(plan(folder, *flags), batches(1, vocab=VOCAB), save=tmp_path)["weights"]
    again = one.train(plan(folder, "--load", tmp_path), [])["weights"]
    assert whole.keys() == again.keys() and all(np.array_equal(whole[name], again[name]) for name in whole)


def test_conversion_keeps_every_bit(folder, convert, tmp_path):
    convert("hf-to-dist", folder, tmp_path / "dist")
    convert("dist-to-hf", tmp_path / "dist", tmp_path / "back", "--hf-checkpoint", folder)
    before, after = tensors(folder), tensors(tmp_path / "back")
    assert after.keys() == {name for name in before if not name.startswith("mtp.")}
    assert all(torch.equal(before[name], after[name]) for name in after)


@pytest.mark.parametrize("change", [{"attention_bias": True}, {"hidden_act": "gelu"}],
                         ids=lambda change: next(iter(change)))
def test_variants_that_are_not_modelled_are_refused(change):
    from miles_specs_qwen3next.families import qwen3_5
    from transformers import AutoConfig

    with pytest.raises(ConfigError, match="qwen3_5_text with .*(attention_bias|hidden_act)"):
        qwen3_5(AutoConfig.for_model("qwen3_5", text_config={**TINY, **WORDS, **change}))


def test_axes_of_positions_are_interleaved_as_in_transformers_module_whatever_a_config_leaves_out():
    from miles_megatron.rope import Rope
    from miles_specs_qwen3next.families import qwen3_5
    from transformers import Qwen3_5Config
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

    config = Qwen3_5Config()
    for key in ("mrope_section", "mrope_interleaved"):
        config.text_config.rope_parameters.pop(key, None)
    rotary = next(one for one in qwen3_5(config).attention if one.rotary).rotary
    positions = torch.tensor([[0, 5, 9], [1, 2, 3], [7, 0, 4]])
    theirs, _ = Qwen3_5TextRotaryEmbedding(config.text_config)(torch.zeros(1), positions[:, None])
    ours, _ = Rope(config.text_config.head_dim, rotary).tables(positions, torch.float32)
    assert torch.equal(ours, theirs[0, :, : ours.shape[1]])
