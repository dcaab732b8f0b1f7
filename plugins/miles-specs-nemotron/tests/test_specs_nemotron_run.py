"""Whole runs, layouts, checkpoints and conversions of a random model with the tokenizer of the tiny examples."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from miles_megatron import estimate
from miles_megatron.testing.checkpoints import tensors
from miles_megatron.testing.demo import demo_run
from miles_megatron.testing.parity import TINY, Case, cases, random_model
from miles_megatron.testing.ranks import batches, distance
from safetensors.torch import save_file

from miles_core.errors import BatchError, ConfigError
from miles_core.plugins.plan import prepare

pytestmark = pytest.mark.xdist_group("specs-nemotron")

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "arithmetic"
CASES = cases(Path(__file__).with_name("parity.toml"))
VOCAB = 264
WORDS = {"vocab_size": VOCAB, "pad_token_id": 256, "bos_token_id": None, "eos_token_id": 258}
RUN = ("--prompt-data", "data/none.jsonl", "--num-rollout", 2, "--rollout-batch-size", 4, "--n-samples-per-prompt", 4,
       "--rollout-max-response-len", 41, "--no-bf16", "--use-dynamic-batch-size", "--max-tokens-per-gpu", 96,
       "--trainer-host", "process", "--disable-rewards-normalization", "--lr", 1e-3)  # fmt: skip
GRADIENTS = ("--no-use-distributed-optimizer", "--clip-grad", 0, "--lr", 0)
TWO = ("--actor-num-gpus-per-node", 2)
BIAS = "backbone.layers.1.mixer.gate.e_score_correction_bias"


def checkpoint(folder, case, **changes):
    """A random model of the case whose vocabulary is the examples'."""
    random_model(Case("nemotron_h", "tiny", {**case.config, **WORDS, **changes})).save_pretrained(folder)
    for file in (EXAMPLES / "tiny-qwen3").glob("*token*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Latent experts, and time steps below time_step_min, as published checkpoints have them, which only transformers
    raises."""
    return checkpoint(tmp_path_factory.mktemp("nemotron"), CASES[3], time_step_min=0.001, time_step_floor=1e-4)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """One without experts."""
    return checkpoint(tmp_path_factory.mktemp("dense"), CASES[1])


def plan(folder, *flags):
    return prepare(None, ["--hf-checkpoint", str(folder), *map(str, (*RUN, *flags))])


def test_a_run_needs_nothing_but_the_checkpoint(folder, tmp_path):
    """Two rollouts with GRPO and the engine's routes: the engine decodes what the trainer trains, to rounding."""
    steps, stderr = demo_run(ROOT, folder, tmp_path, "--use-kl-loss", "--kl-loss-coef", "0.01",
                             "--skip-eval-before-train", "--use-rollout-routing-replay")
    assert "falling back" not in stderr, "transformers need not say which kernels it lacks"
    assert len(steps) == 2
    assert all(one["train/train_rollout_logprob_abs_diff_max"] <= 1e-5 for one in steps)
    assert all(one["train/r3/replayed"] == 1 for one in steps)
    assert steps[0]["train/kl_loss"] == pytest.approx(0, abs=1e-6) and steps[0]["train/grad_norm"] > 0
    before, after = tensors(folder), tensors(tmp_path / "run" / "hf")
    assert before.keys() == after.keys() and torch.equal(before[BIAS], after[BIAS])
    for name in ("A_log", "D", "dt_bias", "conv1d.weight", "conv1d.bias", "norm.weight", "in_proj.weight"):
        name = f"backbone.layers.0.mixer.{name}"
        assert not torch.equal(before[name], after[name]), name
    for name in ("fc1_latent_proj.weight", "fc2_latent_proj.weight", "experts.0.up_proj.weight"):
        name = f"backbone.layers.1.mixer.{name}"
        assert not torch.equal(before[name], after[name]), name


LAYOUTS = {
    # Without experts, which want sequence parallelism.
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
    """The whole gradient, and apart from it that of the mixers' parameters that are small beside the others."""
    folder, [batch] = dense if layout == "tp2" else folder, batches(1, vocab=VOCAB)
    _, expected = one.gradients(plan(folder, *GRADIENTS), batch)
    _, cut = two.gradients(plan(folder, *GRADIENTS, *TWO, *LAYOUTS[layout]), batch)
    mixer = [name for name in expected if name.startswith("backbone.layers.0.mixer.")]
    for names, limit in ((expected, 4e-6), (mixer, 1e-5)):
        assert distance(cut, expected, names) < limit


@pytest.mark.full
def test_a_resume_under_another_layout_goes_on_from_the_same_bits(folder, one, two, tmp_path):
    whole = two.train(plan(folder, *TWO, "--tensor-model-parallel-size", 2, "--sequence-parallel"),
                      batches(1, vocab=VOCAB), save=tmp_path)["weights"]
    again = one.train(plan(folder, "--load", tmp_path), [])["weights"]
    assert whole.keys() == again.keys() and all(np.array_equal(whole[name], again[name]) for name in whole)


@pytest.mark.full
def test_in_bfloat16_every_parameter_is_that_but_the_routers_bias(folder, one):
    """Decays too, as transformers loads them; what is computed with them is fp32."""
    trained = one.train(plan(folder, "--bf16"), batches(1, vocab=VOCAB))
    assert np.isfinite(trained["steps"][0]["train/loss"]) and trained["steps"][0]["train/grad_norm"] > 0
    decays = torch.from_numpy(trained["weights"]["backbone.layers.0.mixer.A_log"])
    assert torch.equal(decays, decays.bfloat16().float())
    assert np.array_equal(trained["weights"][BIAS], tensors(folder)[BIAS])


def test_groups_that_do_not_divide_are_refused(tmp_path):
    """By the plan, before a rank is started."""
    checkpoint(tmp_path, CASES[1], n_groups=1)
    with pytest.raises(BatchError) as caught:
        plan(tmp_path, *TWO, "--tensor-model-parallel-size", 2)
    assert caught.value.code == "model-size-not-divisible" and caught.value.got == "1 / 2"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_memory_plan_counts_every_matrix_and_norm(case, tmp_path):
    """All but the convolutions, the norms of mixers and what there is one of for each head or expert."""
    checkpoint(tmp_path, case)
    size = estimate.dimensions_of(plan(tmp_path).config)
    small = ("A_log", ".D", "dt_bias", "conv1d.weight", "conv1d.bias", "mixer.norm.weight", "correction_bias")
    own = sum(tensor.numel() for name, tensor in tensors(tmp_path).items() if not name.endswith(small))
    # A time step for each head, where linear attention has two numbers.
    mamba = case.config["layers_block_type"].count("linear_attention")
    own += mamba * TINY["hidden_size"] * case.config["mamba_num_heads"]
    layers = len(case.config["layers_block_type"])
    assert sum(estimate.parameters(size, layers, True, True)) == pytest.approx(own, abs=layers)


def test_conversion_keeps_every_bit(folder, convert, tmp_path):
    convert("hf-to-dist", folder, tmp_path / "dist")
    convert("dist-to-hf", tmp_path / "dist", tmp_path / "back", "--hf-checkpoint", folder)
    before, after = tensors(folder), tensors(tmp_path / "back")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_layers_for_drafting_stay_behind_and_are_not_made(folder, one, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    save_file({"mtp.layers.0.norm.weight": torch.ones(TINY["hidden_size"])}, tmp_path / "drafts.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    assert one.train(plan(tmp_path), [])["weights"].keys() == tensors(folder).keys()
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with pytest.raises(ConfigError) as caught:
        one.train(plan(tmp_path, "--plugin", "mtp"), [])
    assert caught.value.code == "mtp-last-layer-without-attention"


def test_names_of_layers_of_older_releases_are_read():
    """Of transformers before 5.16."""
    from miles_specs_nemotron.families import nemotron_h
    from transformers import AutoConfig

    hf, before = (AutoConfig.for_model("nemotron_h", **{**TINY, **CASES[0].config}) for _ in range(2))
    before.layers_block_type = ["mamba", "moe", "attention", "moe"]
    assert before.layer_types == before.layers_block_type, "one list under two names"
    assert nemotron_h(before).spec() == nemotron_h(hf).spec()


REFUSED = {
    "attention_bias": True, "mlp_bias": True, "use_bias": True, "mamba_proj_bias": True,
    "residual_in_fp32": True, "tie_word_embeddings": True, "mlp_hidden_act": "silu", "mamba_hidden_act": "gelu",
    "sliding_window": 8, "n_shared_experts": 2,
    "time_step_limit": [0.0, 0.1],
}  # fmt: skip


@pytest.mark.parametrize("key", REFUSED)
def test_variants_that_are_not_modelled_are_refused_by_name(key):
    from miles_specs_nemotron.families import nemotron_h
    from transformers import AutoConfig

    config = AutoConfig.for_model("nemotron_h", **{**TINY, **CASES[0].config, key: REFUSED[key]})
    with pytest.raises(ConfigError) as caught:
        nemotron_h(config)
    assert caught.value.code == "architecture-variant-unsupported" and key in str(caught.value)
