"""Gemma 3n: runs, layouts, conversions, and what a plan counts."""

from pathlib import Path

import pytest
import torch
from miles_megatron import estimate
from miles_megatron.testing.checkpoints import tensors
from miles_megatron.testing.demo import demo_checkpoint, demo_run, layout_gradients, trainer_plan
from miles_megatron.testing.parity import cases
from miles_megatron.testing.ranks import distance

ROOT = Path(__file__).parents[3]
CASE = {case.name: case for case in cases(Path(__file__).with_name("parity.toml"))}["Gemma 3n, text"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint whose vocabulary is the examples'."""
    return demo_checkpoint(ROOT, CASE, tmp_path_factory.mktemp("gemma3n"), vocab_size_per_layer_input=260)


def test_the_memory_plan_counts_every_parameter(folder):
    """But for two of the four norms of a layer; and norms of keys are counted where these are another layer's too."""
    own = sum(tensor.numel() for tensor in tensors(folder).values())
    model = estimate.dimensions_of(trainer_plan(folder).config)
    assert own - sum(estimate.parameters(model, 6, True, True)) == 6 * 2 * 64 - 3 * 32


@pytest.mark.full
def test_a_run_trains_every_tensor_that_the_engine_decodes_with(folder, tmp_path):
    steps, _ = demo_run(ROOT, folder, tmp_path, "--entropy-coef", "0.01")
    assert len(steps) == 2 and all(one["train/train_rollout_logprob_abs_diff_max"] <= 2e-5 for one in steps)
    before, after = tensors(folder), tensors(tmp_path / "run" / "hf")
    assert before.keys() == after.keys()
    assert not [name for name in before if torch.equal(before[name], after[name])]


LAYOUTS = {
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
    for part in ("altup.", "laurel", "altup_unembed", "per_layer", "0.mlp.gate_proj", "2.self_attn.k_proj.weight"):
        assert distance(found, expected, [name for name in expected if part in name]) < 1e-5, part
