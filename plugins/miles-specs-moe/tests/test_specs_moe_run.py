"""Whole runs, conversions and a router's bias, on random checkpoints with the tokenizer of the tiny examples."""

import json
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from miles_megatron import estimate
from miles_megatron.testing.checkpoints import tensors
from miles_megatron.testing.demo import demo_run
from miles_megatron.testing.parity import TINY, Case, random_model
from miles_megatron.testing.ranks import batches, distance
from safetensors.torch import load_file, save_file

from miles_core.plugins.plan import prepare

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "arithmetic"
CASES = tomllib.loads(Path(__file__).with_name("parity.toml").read_text())
VOCAB = 264
WORDS = {"vocab_size": VOCAB, "num_hidden_layers": 2, "pad_token_id": 256, "bos_token_id": None, "eos_token_id": 258}
BIAS = {"deepseek_v3": "model.layers.1.mlp.gate.e_score_correction_bias",
        "glm4_moe": "model.layers.1.mlp.gate.e_score_correction_bias",
        "minimax_m2": "model.layers.1.block_sparse_moe.e_score_correction_bias",
        "hy_v3": "model.layers.1.mlp.expert_bias"}
RUN = ("--prompt-data", "data/none.jsonl", "--num-rollout", 1, "--rollout-batch-size", 4, "--n-samples-per-prompt", 4,
       "--rollout-max-response-len", 41, "--use-dynamic-batch-size", "--max-tokens-per-gpu", 96, "--trainer-host",
       "process", "--disable-rewards-normalization", "--lr", 1e-3)  # fmt: skip
GRADIENTS = ("--no-bf16", "--no-use-distributed-optimizer", "--clip-grad", 0, "--lr", 0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """(model_type) -> the folder of a random model whose vocabulary is the examples'."""
    made = {}

    def make(family):
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            random_model(Case(family, family, {**CASES[family][0]["config"], **WORDS})).save_pretrained(made[family])
            for file in (EXAMPLES / "tiny-qwen3").glob("*token*"):
                shutil.copy(file, made[family])
        return made[family]

    return make


def plan(folder, *flags):
    return prepare(None, ["--hf-checkpoint", str(folder), *map(str, (*RUN, *flags))])


@pytest.mark.parametrize("family", [name if name == "deepseek_v3" else pytest.param(name, marks=pytest.mark.slow)
                                    for name in BIAS])
def test_a_run_needs_nothing_but_the_checkpoint(checkpoint, tmp_path, family):
    """Two rollouts against a reference; the engine decodes what the trainer trains; the bias stays as it is."""
    folder = checkpoint(family)
    steps, _ = demo_run(ROOT, folder, tmp_path, "--use-kl-loss", "--kl-loss-coef", "0.01")
    assert len(steps) == 2
    assert all(one["train/train_rollout_logprob_abs_diff_max"] <= 1e-5 for one in steps)
    assert steps[0]["train/kl_loss"] == pytest.approx(0, abs=1e-6) and steps[0]["train/grad_norm"] > 0
    before, after = tensors(folder), tensors(tmp_path / "run" / "hf")
    assert before.keys() == after.keys() and torch.equal(before[BIAS[family]], after[BIAS[family]])
    assert not torch.equal(before["model.norm.weight"], after["model.norm.weight"])


@pytest.mark.parametrize("family", BIAS)
def test_the_memory_plan_counts_every_parameter(checkpoint, family):
    """The small ones aside that are no part of it: biases, the router's, and weights of norms over all heads."""
    folder, config = checkpoint(family), plan(checkpoint(family)).config
    own = sum(tensor.numel() for name, tensor in tensors(folder).items()
              if not name.endswith((".bias", "correction_bias", "expert_bias", "q_norm.weight", "k_norm.weight")))
    model = replace(estimate.dimensions_of(config), qk_norm=False)
    assert sum(estimate.parameters(model, 2, True, True)) == own


@pytest.mark.full
@pytest.mark.parametrize("family", BIAS)
def test_in_bfloat16_a_routers_bias_keeps_its_bits(checkpoint, one, family, tmp_path):
    """Loaded, saved, resumed, and streamed."""
    folder, rollouts = checkpoint(family), batches(2, vocab=VOCAB)
    made = plan(folder, "--bf16")
    whole = one.train(made, rollouts[:1], save=tmp_path)
    assert np.array_equal(whole["weights"][BIAS[family]], tensors(folder)[BIAS[family]])
    again = one.train(plan(folder, "--bf16", "--load", tmp_path), [])
    assert all(np.array_equal(again["weights"][name], weight) for name, weight in whole["weights"].items())


@pytest.mark.full
def test_a_reference_that_is_swapped_in_has_its_own_bias(checkpoint, one, tmp_path):
    """With another bias, and so other experts, its log-probs are others; the actor's come back after it."""
    folder, name = checkpoint("glm4_moe"), BIAS["glm4_moe"]
    shutil.copytree(folder, tmp_path / "ref")
    changed = tensors(folder)
    changed[name] = changed[name].flip(0)
    save_file(changed, tmp_path / "ref" / "model.safetensors", {"format": "pt"})
    one.train(plan(folder, "--no-bf16"), [], save=tmp_path / "saved")
    flags = ("--no-bf16", "--use-kl-loss", "--kl-loss-coef", 1, "--load", tmp_path / "saved")
    same, other = (one.train(plan(folder, *flags, "--ref-load", ref), batches(1, vocab=VOCAB))
                   for ref in (folder, tmp_path / "ref"))
    assert same["steps"][0]["train/kl_loss"] == pytest.approx(0, abs=1e-6)
    assert other["steps"][0]["train/kl_loss"] > 1e-4
    assert np.array_equal(other["weights"][name], tensors(folder)[name])


@pytest.mark.slow
def test_the_bias_moves_when_a_run_asks_for_it(checkpoint, one, two):
    """By the rate, towards the experts that too few tokens chose (arXiv:2408.15664), the same on any layout."""
    folder, rollouts, name = checkpoint("glm4_moe"), batches(1, vocab=VOCAB), BIAS["glm4_moe"]
    before = tensors(folder)[name].numpy()
    flags = ("--no-bf16", "--moe-router-bias-update-rate", 0.01)
    moved = one.train(plan(folder, *flags), rollouts)["weights"][name]
    steps = np.round((moved - before) / 0.01, 3)
    assert set(np.abs(steps)) <= {0, 1} and {-1, 1} <= set(steps)
    cut = two.train(plan(folder, *flags, "--actor-num-gpus-per-node", 2, "--expert-model-parallel-size", 2), rollouts)
    assert np.array_equal(cut["weights"][name], moved)


LAYOUTS = {
    "tp2-sp-recompute": ("deepseek_v3", ("--tensor-model-parallel-size", 2, "--sequence-parallel",
                                         "--recompute-granularity", "full")),
    "tp2-sp-one-expert-rank-each": ("deepseek_v3", ("--tensor-model-parallel-size", 2, "--sequence-parallel",
                                                    "--expert-tensor-parallel-size", 1,
                                                    "--expert-model-parallel-size", 2)),
    "wide-norm-recompute": ("minimax_m2", ("--tensor-model-parallel-size", 2, "--sequence-parallel",
                                           "--recompute-granularity", "full")),
    "dp2-attention-again": ("deepseek_v3", ("--recompute-granularity", "selective", "--recompute-modules",
                                            "core_attn")),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("layout", [
    "tp2-sp-one-expert-rank-each", pytest.param("tp2-sp-recompute", marks=pytest.mark.slow),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("wide-norm-recompute", "dp2-attention-again"))])
def test_a_layout_changes_nothing(checkpoint, one, two, layout):
    family, flags = LAYOUTS[layout]
    folder, [batch] = checkpoint(family), batches(1, vocab=VOCAB)
    _, expected = one.gradients(plan(folder, *GRADIENTS), batch)
    _, found = two.gradients(plan(folder, *GRADIENTS, "--actor-num-gpus-per-node", 2, *flags), batch)
    assert distance(found, expected) < 4e-6


@pytest.mark.parametrize("family", BIAS)
def test_conversion_keeps_every_bit(checkpoint, convert, tmp_path, family):
    folder = checkpoint(family)
    convert("hf-to-dist", folder, tmp_path / "dist")
    convert("dist-to-hf", tmp_path / "dist", tmp_path / "back", "--hf-checkpoint", folder)
    before, after = tensors(folder), tensors(tmp_path / "back")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.fixture(scope="module")
def drafted(checkpoint, tmp_path_factory):
    """DeepSeek-V3 with one layer for multi-token prediction, as its checkpoints have it."""
    folder = tmp_path_factory.mktemp("drafted")
    shutil.copytree(checkpoint("deepseek_v3"), folder, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(0)

    def near(tensor):
        return tensor + 0.02 * torch.randn(tensor.shape, generator=generator)

    own = tensors(folder)
    more = {name.replace(".layers.1.", ".layers.2."): near(tensor) for name, tensor in own.items()
            if ".layers.1." in name}
    hidden = TINY["hidden_size"]
    more |= {f"model.layers.2.{name}.weight": near(torch.ones(hidden))
             for name in ("enorm", "hnorm", "shared_head.norm")}
    more |= {"model.layers.2.eh_proj.weight": near(torch.zeros(hidden, 2 * hidden)),
             "model.layers.2.embed_tokens.weight": own["model.embed_tokens.weight"].clone(),
             "model.layers.2.shared_head.head.weight": own["lm_head.weight"].clone()}
    save_file(more, folder / "drafts.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return folder


def test_layers_for_drafting_stay_behind_or_come_along(drafted, checkpoint, one):
    """Without the plugin mtp they are left out; with it they are kept, the policy being the same."""
    rollouts = batches(1, vocab=VOCAB)
    alone = one.train(plan(drafted, "--no-bf16"), rollouts)["weights"]
    plain = one.train(plan(checkpoint("deepseek_v3"), "--no-bf16"), rollouts)["weights"]
    kept = one.train(plan(drafted, "--no-bf16", "--plugin", "mtp"), rollouts)["weights"]
    assert alone.keys() == plain.keys() and all(np.array_equal(alone[name], plain[name]) for name in plain)
    more = {name: tensor for name, tensor in load_file(drafted / "drafts.safetensors").items()
            if "embed_tokens" not in name and "shared_head.head" not in name}
    assert kept.keys() - alone.keys() == more.keys()
    assert all(np.array_equal(kept[name], alone[name]) for name in alone)
    assert all(np.array_equal(kept[name], tensor) for name, tensor in more.items())


@pytest.mark.full
def test_layers_for_drafting_train_beside_the_policy(drafted, one):
    found = one.train(plan(drafted, "--no-bf16", "--plugin", "mtp", "--enable-mtp-training"), batches(1, vocab=VOCAB))
    assert 0 < found["steps"][0]["train/mtp_loss"] < 20
    name = "model.layers.2.eh_proj.weight"
    assert not np.array_equal(found["weights"][name], load_file(drafted / "drafts.safetensors")[name])


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v4"])
def test_a_conversion_to_bfloat16_leaves_biases_and_tables_of_routers_their_dtype(checkpoint, tmp_path, family):
    """As training does: in bfloat16 a bias chooses other experts, and numbers above 256 in a table are others."""
    from miles_core.cli import cli

    source, out, back = checkpoint(family), tmp_path / "dist", tmp_path / "hf"
    cli(["convert", "hf-to-dist", str(source), str(out), "--dtype", "bfloat16"], standalone_mode=False)
    cli(["convert", "dist-to-hf", str(out), str(back), "--hf-checkpoint", str(source), "--dtype", "bfloat16"],
        standalone_mode=False)
    before, after = tensors(source), tensors(back)
    kept = {name for name in before if name.endswith(("gate.e_score_correction_bias", "gate.bias", "gate.tid2eid"))}
    assert kept and before.keys() == after.keys()
    for name, tensor in before.items():
        expected = tensor if name in kept else tensor.bfloat16()
        assert after[name].dtype == expected.dtype and torch.equal(after[name], expected), name


def test_a_conversion_announces_layers_for_drafting_and_counts_none_that_it_lacks(drafted, tmp_path, caplog):
    """The files and their config.json agree, and with the plugin mtp nothing is lost."""
    from miles_core.cli import cli

    found = {}
    for name, plugin in (("alone", ()), ("kept", ("--plugin", "mtp"))):
        out, back = tmp_path / name, tmp_path / f"{name}-hf"
        caplog.clear()
        cli(["convert", "hf-to-dist", str(drafted), str(out), *plugin], standalone_mode=False)
        said = "model.layers.2." in caplog.text
        cli(["convert", "dist-to-hf", str(out), str(back), "--hf-checkpoint", str(drafted), *plugin],
            standalone_mode=False)
        counted = json.loads((back / "config.json").read_text())["num_nextn_predict_layers"]
        found[name] = said, counted, any(".layers.2." in tensor for tensor in tensors(back))
    assert found == {"alone": (True, 0, False), "kept": (False, 1, True)}
