"""Gemma 4 with experts: whole runs that replay routes or train adapters, layouts, conversions, and what a plan counts."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from miles_megatron import estimate
from miles_megatron.testing.checkpoints import tensors
from miles_megatron.testing.demo import demo_run
from miles_megatron.testing.parity import cases, random_model
from miles_megatron.testing.ranks import batches, distance

from miles_core.plugins.plan import prepare

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "arithmetic"
CASE = next(case for case in cases(Path(__file__).with_name("parity.toml")) if case.name == "Gemma 4, text, with experts")
VOCAB = 264
WORDS = {"vocab_size": VOCAB, "num_hidden_layers": 2, "pad_token_id": 256, "bos_token_id": None, "eos_token_id": 258,
         "layer_types": ["sliding_attention", "full_attention"]}
RUN = ("--prompt-data", "data/none.jsonl", "--num-rollout", 1, "--rollout-batch-size", 4, "--n-samples-per-prompt", 4,
       "--rollout-max-response-len", 41, "--use-dynamic-batch-size", "--max-tokens-per-gpu", 96, "--trainer-host",
       "process", "--disable-rewards-normalization", "--no-bf16", "--lr", 1e-3)  # fmt: skip
GRADIENTS = ("--no-use-distributed-optimizer", "--clip-grad", 0, "--lr", 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint whose vocabulary is the examples'."""
    where = tmp_path_factory.mktemp("gemma4")
    random_model(replace(CASE, config=CASE.config | WORDS)).save_pretrained(where)
    for file in (EXAMPLES / "tiny-qwen3").glob("*token*"):
        shutil.copy(file, where)
    return where


def plan(folder, *flags):
    return prepare(None, ["--hf-checkpoint", str(folder), *map(str, (*RUN, *flags))])


def test_the_memory_plan_counts_every_matrix(folder):
    own = sum(tensor.numel() for tensor in tensors(folder).values() if tensor.dim() > 1)
    model = replace(estimate.dimensions_of(plan(folder).config), qk_norm=False)
    norms = 2 * 2 * 64 + 64  # two of each layer, and the last
    assert sum(estimate.parameters(model, 2, True, True)) == own + norms


@pytest.mark.full
def test_routes_are_replayed_and_every_part_is_trained(folder, tmp_path):
    """The engine rounds to bfloat16: without its routes the trainer would be further from it."""
    steps, _ = demo_run(ROOT, folder, tmp_path, "--plugin", "r3", "--r3.compare-every", "1", "--entropy-coef", "0.01")
    print([{k: v for k, v in s.items() if "r3" in k or "diff" in k} for s in steps])
    assert len(steps) == 2
    assert all(one["train/train_rollout_logprob_abs_diff_max"] <= 2e-5 for one in steps)
    before, after = tensors(folder), tensors(tmp_path / "run" / "hf")
    assert before.keys() == after.keys()
    assert {name for name in before if torch.equal(before[name], after[name])} == {
        name for name in before if name.endswith("layer_scalar")}
