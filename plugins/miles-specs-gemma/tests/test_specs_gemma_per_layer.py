"""Gemma 4 E2B and E4B: runs, adapters, layouts, conversions, and what a plan counts."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from miles_megatron import estimate
from miles_megatron.testing.checkpoints import tensors
from miles_megatron.testing.demo import VOCAB, demo_checkpoint, demo_run, layout_gradients, trainer_plan
from miles_megatron.testing.parity import cases, random_model
from miles_megatron.testing.ranks import distance
from safetensors.torch import save_file

ROOT = Path(__file__).parents[3]
CASES = {case.name: case for case in cases(Path(__file__).with_name("parity.toml"))}
CASE, BESIDE = CASES["Gemma 4, text, with embeddings for every layer"], CASES["Gemma 4 with embeddings for every layer"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint whose vocabulary is the examples'."""
    return demo_checkpoint(ROOT, CASE, tmp_path_factory.mktemp("gemma4"), vocab_size_per_layer_input=VOCAB)


def test_the_memory_plan_counts_every_matrix(folder):
    own = sum(tensor.numel() for tensor in tensors(folder).values() if tensor.dim() > 1)
    model = replace(estimate.dimensions_of(trainer_plan(folder).config), qk_norm=False)
    norms = 6 * 3 * 64 + 16 + 64  # three of each layer, that of the further embeddings, and the last
    # Those of attention are six times the whole number that an average layer has.
    assert 0 <= own + norms - sum(estimate.parameters(model, 6, True, True)) < 6


def test_an_engine_keeps_no_keys_of_layers_that_borrow_them(folder):
    from miles_megatron.engine_weights import cache

    config = trainer_plan(folder).config
    assert cache(config, estimate.dimensions_of(config)) == 2 * 2 * 2 * (32 + 64 + 32)


@pytest.mark.full
def test_a_run_trains_every_tensor_that_the_engine_decodes_with(folder, tmp_path):
    steps, _ = demo_run(ROOT, folder, tmp_path, "--entropy-coef", "0.01")
    assert len(steps) == 2 and all(one["train/train_rollout_logprob_abs_diff_max"] <= 2e-5 for one in steps)
    before, after = tensors(folder), tensors(tmp_path / "run" / "hf")
    assert before.keys() == after.keys()
    assert {name for name in before if torch.equal(before[name], after[name])} == {
        name for name in before if name.endswith("layer_scalar")}


@pytest.mark.full
def test_adapters_train_in_layers_that_lend_and_borrow(folder, tmp_path):
    """The engine is sent the merged weights; recomputation finds a first layer without a trained input."""
    steps, _ = demo_run(ROOT, folder, tmp_path, "--plugin", "lora", "--lora-rank", "4", "--lr", "1e-2",
                        "--entropy-coef", "0.01", "--recompute-granularity", "full")
    assert len(steps) == 2
    assert all(one["train/train_rollout_logprob_abs_diff_max"] <= 2e-5 for one in steps)
    before, after = tensors(folder), tensors(tmp_path / "run" / "hf")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if name.endswith("_proj.weight")}


LAYOUTS = {
    "recompute": ("--recompute-granularity", "full"),
    "recompute-twos": ("--recompute-granularity", "full", "--recompute-num-layers", 2),
    "tp2": ("--tensor-model-parallel-size", 2),
    "tp2-sp-recompute": ("--tensor-model-parallel-size", 2, "--sequence-parallel", "--recompute-granularity", "full"),
    "pp2-recompute": ("--pipeline-model-parallel-size", 2, "--recompute-granularity", "full"),
    "pp2-vpp3": ("--pipeline-model-parallel-size", 2, "--num-virtual-stages-per-pipeline-rank", 3),
    "cp2-core-attention-again": ("--context-parallel-size", 2, "--recompute-granularity", "selective",
                                 "--recompute-modules", "core_attn"),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_changes_nothing(folder, one, two, layout):
    """Of the whole gradient, and of parts that are small beside it."""
    found, expected = layout_gradients(folder, one, two, *LAYOUTS[layout])
    assert distance(found, expected) < 4e-6
    for part in ("per_layer", "2.self_attn.k_proj.weight", "1.self_attn.v_proj.weight", "5.self_attn.q_norm.weight"):
        assert distance(found, expected, [name for name in expected if part in name]) < 1e-5, part


@pytest.mark.full
def test_tensor_parallel_ranks_share_a_key_that_is_lent(one, two, tmp_path):
    """As of E2B, which has one."""
    folder = demo_checkpoint(ROOT, CASE, tmp_path, vocab_size_per_layer_input=VOCAB, num_key_value_heads=1)
    found, expected = layout_gradients(folder, one, two, "--tensor-model-parallel-size", 2)
    assert distance(found, expected) < 4e-6
    for part in ("2.self_attn.k_proj.weight", "1.self_attn.v_proj.weight", "5.self_attn.q_norm.weight"):
        assert distance(found, expected, [name for name in expected if part in name]) < 1e-5, part


@pytest.mark.parametrize("inside", ["model.", "model.language_model."])
def test_conversion_keeps_every_bit(convert, tmp_path, inside):
    """Also of both towers, and of projections that the files have and no layer uses."""
    random_model(CASE if inside == "model." else BESIDE).save_pretrained(tmp_path / "hf")
    before = tensors(tmp_path / "hf")
    assert inside == "model." or any(name.startswith("model.audio_tower.") for name in before)
    last = (CASE if inside == "model." else BESIDE).text.get("num_hidden_layers", 4) - 1
    unused = f"{inside}layers.{last}.self_attn."
    before |= {f"{unused}k_proj.weight": torch.rand(64, 64), f"{unused}k_norm.weight": torch.rand(32)}
    save_file(before, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    convert("hf-to-dist", tmp_path / "hf", tmp_path / "dist")
    convert("dist-to-hf", tmp_path / "dist", tmp_path / "back", "--hf-checkpoint", tmp_path / "hf")
    after = tensors(tmp_path / "back")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
