"""DeepSeek-V4: runs, layouts, conversions, tables of token ids, blocks of queries, and what a plan counts."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from miles_megatron import estimate
from miles_megatron.testing.checkpoints import tensors
from miles_megatron.testing.demo import demo_run
from miles_megatron.testing.parity import TINY, cases, model_parity, random_model
from miles_megatron.testing.ranks import batches, distance
from miles_specs_moe import compressed
from miles_specs_moe.deepseek_v4 import deepseek_v4

from miles_core.errors import ConfigError
from miles_core.plugins.plan import prepare

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "arithmetic"
CASES = {case.name: case for case in cases(Path(__file__).with_name("parity.toml"))}
CASE, ODD = CASES["DeepSeek-V4"], CASES["DeepSeek-V4, three streams"]
VOCAB = 264
WORDS = {"vocab_size": VOCAB, "pad_token_id": 256, "bos_token_id": None, "eos_token_id": 258}
RUN = ("--prompt-data", "data/none.jsonl", "--num-rollout", 1, "--rollout-batch-size", 4, "--n-samples-per-prompt", 4,
       "--rollout-max-response-len", 41, "--use-dynamic-batch-size", "--max-tokens-per-gpu", 96, "--trainer-host",
       "process", "--disable-rewards-normalization", "--lr", 1e-3)  # fmt: skip
GRADIENTS = ("--no-bf16", "--no-use-distributed-optimizer", "--clip-grad", 0, "--lr", 0)
STAYS = (".indexer.", ".tid2eid", ".gate.bias")
"""In names of tensors that no gradient moves."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint whose vocabulary is the examples'."""
    where = tmp_path_factory.mktemp("v4")
    random_model(replace(CASE, config=CASE.config | WORDS)).save_pretrained(where)
    for file in (EXAMPLES / "tiny-qwen3").glob("*token*"):
        shutil.copy(file, where)
    return where


def plan(folder, *flags):
    return prepare(None, ["--hf-checkpoint", str(folder), *map(str, (*RUN, *flags))])


def test_a_run_trains_every_tensor_that_the_engine_decodes_with(folder, tmp_path):
    steps, _ = demo_run(ROOT, folder, tmp_path, "--entropy-coef", "0.01")
    gaps = [one["train/train_rollout_logprob_abs_diff_max"] for one in steps]
    print(gaps)
    assert len(gaps) == 2 and max(gaps) <= 2e-5
    before, after = tensors(folder), tensors(tmp_path / "run" / "hf")
    assert before.keys() == after.keys()
    assert {name for name in before if torch.equal(before[name], after[name])} == {
        name for name in before if any(part in name for part in STAYS)}
