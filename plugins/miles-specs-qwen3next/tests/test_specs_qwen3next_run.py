"""Whole runs, layouts, checkpoints and conversions of a random model with the tokenizer of the tiny examples."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from miles_megatron.testing.checkpoints import tensors
from miles_megatron.testing.demo import demo_run
from miles_megatron.testing.parity import TINY, Case, cases, random_model
from miles_megatron.testing.ranks import batches, distance
from safetensors.torch import save_file

from miles_core.errors import BatchError, ConfigError
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
GRADIENTS = ("--no-use-distributed-optimizer", "--clip-grad", 0, "--lr", 0)
TWO = ("--actor-num-gpus-per-node", 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint whose vocabulary is the examples'."""
    found = tmp_path_factory.mktemp("qwen3_next")
    first = cases(Path(__file__).with_name("parity.toml"))[0]
    random_model(Case("qwen3_next", "tiny", {**first.config, **WORDS})).save_pretrained(found)
    for file in (EXAMPLES / "tiny-qwen3").glob("*token*"):
        shutil.copy(file, found)
    return found


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """One without experts."""
    found = tmp_path_factory.mktemp("dense")
    third = cases(Path(__file__).with_name("parity.toml"))[2]
    random_model(Case("qwen3_next", "dense", {**third.config, **WORDS})).save_pretrained(found)
    return found


def plan(folder, *flags):
    return prepare(None, ["--hf-checkpoint", str(folder), *map(str, (*RUN, *flags))])


def test_a_run_needs_nothing_but_the_checkpoint(folder, tmp_path):
    """Two rollouts with GRPO: the engine decodes what the trainer trains, to rounding."""
    steps, stderr = demo_run(ROOT, folder, tmp_path, "--use-kl-loss", "--kl-loss-coef", "0.01")
    assert "falling back" not in stderr, "transformers need not say which kernels it lacks"
    assert len(steps) == 2
    assert all(one["train/train_rollout_logprob_abs_diff_max"] <= 2e-5 for one in steps)
    assert steps[0]["train/kl_loss"] == pytest.approx(0, abs=1e-6) and steps[0]["train/grad_norm"] > 0
    before, after = tensors(folder), tensors(tmp_path / "run" / "hf")
    assert before.keys() == after.keys()
    for name in ("linear_attn.A_log", "linear_attn.conv1d.weight", "linear_attn.norm.weight",
                 "mlp.shared_expert_gate.weight"):
        assert not torch.equal(before[f"model.layers.0.{name}"], after[f"model.layers.0.{name}"]), name


LAYOUTS = {
    # Without experts, which want sequence parallelism: the norm that all heads share is summed up without it too.
    "tp2": ("--tensor-model-parallel-size", 2),
    "tp2-sp-recompute": ("--tensor-model-parallel-size", 2, "--sequence-parallel", "--recompute-granularity", "full"),
    "tp2-ep2": ("--tensor-model-parallel-size", 2, "--sequence-parallel", "--expert-tensor-parallel-size", 1,
                "--expert-model-parallel-size", 2),
    "cp2-recompute": ("--context-parallel-size", 2, "--recompute-granularity", "full"),
    "dp2": (),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tp2-ep2", *(pytest.param(name, marks=pytest.mark.slow) for name in (
    "cp2-recompute", "dp2", "tp2", "tp2-sp-recompute"))])
def test_a_layout_changes_nothing(folder, dense, one, two, layout):
    """The whole gradient, and apart from it that of the parameters which are small beside the others."""
    folder, [batch] = dense if layout == "tp2" else folder, batches(1, vocab=VOCAB)
    _, expected = one.gradients(plan(folder, *GRADIENTS), batch)
    _, found = two.gradients(plan(folder, *GRADIENTS, *TWO, *LAYOUTS[layout]), batch)
    mixer = [name for name in expected if "linear_attn" in name and not name.endswith(("A_log", "dt_bias"))]
    for names, limit in ((expected, 4e-6), (mixer, 1e-5), (["model.layers.0.linear_attn.norm.weight"], 1e-5)):
        assert distance(found, expected, names) < limit


@pytest.mark.full
def test_tensor_parallel_ranks_share_a_key(one, two, tmp_path):
    """Each has its own queries and their gates: the whole gradient, and so every weight's name, is that of one rank."""
    third = cases(Path(__file__).with_name("parity.toml"))[2]
    random_model(Case("qwen3_next", "dense", {**third.config, **WORDS, "num_key_value_heads": 1})
                 ).save_pretrained(tmp_path)
    for file in (EXAMPLES / "tiny-qwen3").glob("*token*"):
        shutil.copy(file, tmp_path)
    [batch] = batches(1, vocab=VOCAB)
    _, expected = one.gradients(plan(tmp_path, *GRADIENTS), batch)
    _, shared = two.gradients(plan(tmp_path, *GRADIENTS, *TWO, "--tensor-model-parallel-size", 2), batch)
    attention = [name for name in expected if "self_attn" in name]
    assert distance(shared, expected) < 4e-6 and distance(shared, expected, attention) < 1e-5


@pytest.mark.full
def test_a_resume_under_another_layout_goes_on_from_the_same_bits(folder, one, two, tmp_path):
    whole = two.train(plan(folder, *TWO, "--tensor-model-parallel-size", 2, "--sequence-parallel"),
                      batches(1, vocab=VOCAB), save=tmp_path)["weights"]
    again = one.train(plan(folder, "--load", tmp_path), [])["weights"]
    assert whole.keys() == again.keys() and all(np.array_equal(whole[name], again[name]) for name in whole)


@pytest.mark.full
def test_in_bfloat16_every_parameter_is_that(folder, one):
    """Decays too, as transformers loads them; what is computed with them is fp32."""
    found = one.train(plan(folder, "--bf16"), batches(1, vocab=VOCAB))
    assert np.isfinite(found["steps"][0]["train/loss"]) and found["steps"][0]["train/grad_norm"] > 0
    decays = torch.from_numpy(found["weights"]["model.layers.0.linear_attn.A_log"])
    assert torch.equal(decays, decays.bfloat16().float())


def test_heads_that_do_not_divide_are_refused(tmp_path):
    """By the plan, before a rank is started."""
    odd = Case("qwen3_next", "odd", {**cases(Path(__file__).with_name("parity.toml"))[2].config, **WORDS,
                                     "linear_num_key_heads": 3})
    random_model(odd).save_pretrained(tmp_path)
    with pytest.raises(BatchError, match="linear_num_key_heads 3 does not divide by tensor_model_parallel_size 2"):
        plan(tmp_path, *TWO, "--tensor-model-parallel-size", 2)


def test_conversion_keeps_every_bit(folder, convert, tmp_path):
    convert("hf-to-dist", folder, tmp_path / "dist")
    convert("dist-to-hf", tmp_path / "dist", tmp_path / "back", "--hf-checkpoint", folder)
    before, after = tensors(folder), tensors(tmp_path / "back")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.full
def test_layers_for_drafting_stay_behind_or_come_along(folder, one, tmp_path):
    """As the released checkpoints have them: without the plugin mtp they are left out, with it they are trained."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    draw = torch.Generator().manual_seed(0)
    last = "model.layers.1."
    more = {name.replace(last, "mtp.layers.0."): tensor + 0.02 * torch.randn(tensor.shape, generator=draw)
            for name, tensor in tensors(folder).items() if name.startswith(last)}
    hidden = TINY["hidden_size"]
    more |= {f"mtp.{name}.weight": 0.1 * torch.randn(hidden, generator=draw)
             for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    more["mtp.fc.weight"] = 0.1 * torch.randn(hidden, 2 * hidden, generator=draw)
    save_file(more, tmp_path / "drafts.safetensors", {"format": "pt"})
    rollouts = batches(1, vocab=VOCAB)
    alone = one.train(plan(tmp_path), rollouts)["weights"]
    plain = one.train(plan(folder), rollouts)["weights"]
    assert alone.keys() == plain.keys() and all(np.array_equal(alone[name], plain[name]) for name in plain)
    kept = one.train(plan(tmp_path, "--plugin", "mtp", "--enable-mtp-training"), rollouts)
    assert kept["weights"].keys() - alone.keys() == more.keys()
    assert 0 < kept["steps"][0]["train/mtp_loss"] < 20
    assert not np.array_equal(kept["weights"]["mtp.fc.weight"], more["mtp.fc.weight"])


@pytest.mark.parametrize("change", [{"attention_bias": True}, {"hidden_act": "gelu"},
                                    {"layer_types": ["linear_attention", "sliding_attention"]}],
                         ids=lambda change: next(iter(change)))
def test_variants_that_are_not_modelled_are_refused(change):
    from miles_specs_qwen3next.families import qwen3_next
    from transformers import AutoConfig

    with pytest.raises(ConfigError, match="qwen3_next with .*(attention_bias|hidden_act|sliding_attention)"):
        qwen3_next(AutoConfig.for_model("qwen3_next", **{**TINY, **WORDS, **change}))
