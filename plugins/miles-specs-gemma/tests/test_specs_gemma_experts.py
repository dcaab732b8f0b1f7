"""Gemma 4 with experts: runs that replay routes or train adapters, layouts, conversions, and what a plan counts."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from miles_megatron import cpu, estimate
from miles_megatron.model import build, transformer_config
from miles_megatron.testing.checkpoints import tensors
from miles_megatron.testing.demo import demo_checkpoint, demo_run, layout_gradients, trainer_plan
from miles_megatron.testing.parity import cases, packed_logits, random_model
from miles_megatron.testing.ranks import distance
from miles_specs_gemma.families import gemma4_text

from miles_core.errors import ConfigError

ROOT = Path(__file__).parents[3]
CASES = {case.name: case for case in cases(Path(__file__).with_name("parity.toml"))}
CASE = CASES["Gemma 4, text, with experts"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint whose vocabulary is the examples'."""
    return demo_checkpoint(ROOT, CASE, tmp_path_factory.mktemp("gemma4"), num_hidden_layers=2,
                           layer_types=["sliding_attention", "full_attention"])


def test_the_memory_plan_counts_every_matrix(folder):
    own = sum(tensor.numel() for tensor in tensors(folder).values() if tensor.dim() > 1)
    model = replace(estimate.dimensions_of(trainer_plan(folder).config), qk_norm=False)
    norms = 2 * 2 * 64 + 64  # two of each layer, and the last
    assert sum(estimate.parameters(model, 2, True, True)) == own + norms


@pytest.mark.parametrize(("name", "widths"), [("Gemma 4, text", 6), ("Gemma 4, text, with experts", 9),
                                              ("Gemma 4, text, with embeddings for every layer", 8)])
def test_a_layer_keeps_what_the_plan_counts(name, widths):
    """Tensors as wide as a token, of one size with no other: what four layers keep beyond two."""
    assert (widths_kept(CASES[name], 4) - widths_kept(CASES[name], 2)) / 2 == widths


def widths_kept(case, layers):
    cpu.initialize()
    kinds = ["sliding_attention"] * (layers - 1) + ["full_attention"]
    odd = {"num_hidden_layers": layers, "layer_types": kinds, "hidden_size": 56, "num_kv_shared_layers": 0}
    hf, kept = random_model(replace(case, config=case.config | odd)).config, {}
    spec, tokens = gemma4_text(hf).spec(), torch.arange(3, 93)

    def keep(tensor):
        if tensor.numel() == len(tokens) * 56:
            kept[tensor.data_ptr()] = tensor  # alive, so that no other has its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        packed_logits(build(transformer_config(spec), spec), [tokens], None)
    return len(kept)


@pytest.mark.full
def test_routes_are_replayed_and_every_part_is_trained(folder, tmp_path):
    """The engine rounds to bfloat16, so that its router now and then chooses otherwise."""
    steps, _ = demo_run(ROOT, folder, tmp_path, "--plugin", "r3", "--r3.compare-every", "1", "--entropy-coef", "0.01",
                        "--engine-dtype", "bfloat16")
    assert len(steps) == 2 and all(one["train/r3/replayed"] == 1 for one in steps)
    first = steps[0]
    assert first["train/r3/routes_differ"] > 0
    assert first["rollout/r3/log_prob_diff"] < first["rollout/r3/log_prob_diff_free"]
    before, after = tensors(folder), tensors(tmp_path / "run" / "hf")
    assert before.keys() == after.keys()
    assert {name for name in before if torch.equal(before[name], after[name])} == {
        name for name in before if name.endswith("layer_scalar")}


@pytest.mark.full
def test_adapters_are_on_the_dense_mlp_and_the_experts_and_not_on_the_router(folder, tmp_path):
    """The engine is sent the merged weights."""
    steps, _ = demo_run(ROOT, folder, tmp_path, "--plugin", "lora", "--lora-rank", "4", "--lr", "1e-2",
                        "--entropy-coef", "0.01")
    assert len(steps) == 2
    assert all(one["train/train_rollout_logprob_abs_diff_max"] <= 2e-5 for one in steps)
    before, after = tensors(folder), tensors(tmp_path / "run" / "hf")
    moved = {name.partition(".layers.0.")[2] for name in before if not torch.equal(before[name], after[name])} - {""}
    attention = {f"self_attn.{part}_proj.weight" for part in "qkvo"}
    dense = {f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    assert moved == {*attention, *dense, "experts.gate_up_proj", "experts.down_proj"}


LAYOUTS = {
    "tp2-sp-one-expert-rank-each": ("--tensor-model-parallel-size", 2, "--sequence-parallel",
                                    "--expert-tensor-parallel-size", 1, "--expert-model-parallel-size", 2),
    "tp2-sp-recompute": ("--tensor-model-parallel-size", 2, "--sequence-parallel", "--recompute-granularity", "full"),
    "ep2-experts-again": ("--expert-model-parallel-size", 2, "--recompute-granularity", "selective",
                          "--recompute-modules", "moe"),
    "dp2-dense-again": ("--recompute-granularity", "selective", "--recompute-modules", "shared_experts"),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_changes_nothing(folder, one, two, layout):
    """Of the whole gradient, and of the router's and the norms' parts, which are small beside it."""
    found, expected = layout_gradients(folder, one, two, *LAYOUTS[layout])
    assert distance(found, expected) < 4e-6
    for part in ("router.scale", "router.per_expert_scale", "feedforward_layernorm_1.weight",
                 "feedforward_layernorm_2.weight"):
        assert distance(found, expected, [name for name in expected if name.endswith(part)]) < 1e-5, part


@pytest.mark.full
def test_tensor_parallel_ranks_share_the_key_that_is_a_value(one, two, tmp_path):
    """In layers whose heads of keys are fewer than the ranks, beside layers that have enough."""
    folder = demo_checkpoint(ROOT, CASE, tmp_path, num_global_key_value_heads=1)
    found, expected = layout_gradients(folder, one, two, "--tensor-model-parallel-size", 2, "--sequence-parallel")
    assert distance(found, expected) < 4e-6
    for part in ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.q_norm.weight"):
        assert distance(found, expected, [name for name in expected if name.endswith(part)]) < 1e-5, part


@pytest.mark.parametrize("name", ["Gemma 4, text, with experts", "Gemma 4 with experts"])
def test_conversion_keeps_every_bit(name, convert, tmp_path):
    """Of layers whose heads differ, which a checkpoint has one by one, and of others, which it has stacked."""
    random_model(CASES[name]).save_pretrained(tmp_path / "hf")
    convert("hf-to-dist", tmp_path / "hf", tmp_path / "dist")
    convert("dist-to-hf", tmp_path / "dist", tmp_path / "back", "--hf-checkpoint", tmp_path / "hf")
    before, after = tensors(tmp_path / "hf"), tensors(tmp_path / "back")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_the_dense_mlp_is_not_computed_beside_the_dispatcher(folder):
    """Which would pass by the norms around it."""
    from transformers import AutoConfig

    spec = gemma4_text(AutoConfig.from_pretrained(folder)).spec()
    with pytest.raises(ConfigError, match="moe_shared_expert_overlap disagrees with the checkpoint"):
        transformer_config(spec, {"moe_shared_expert_overlap": True})
