"""Muon under Megatron: the steps of the trainer fsdp, the same in every layout, runs that go on, and what the plan says."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from miles_megatron.testing.ranks import batches

from miles_core.errors import CheckpointError, MilesError
from miles_core.plugins.plan import prepare

pytestmark = pytest.mark.xdist_group("muon")  # one worker: the processes are started once

SIZES = dict(vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, max_position_embeddings=128, eos_token_id=258, pad_token_id=256,
             tie_word_embeddings=False)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1,
               norm_topk_prob=True)
RUN = ("--prompt-data", "x/no.jsonl", "--num-rollout", "3", "--rollout-batch-size", "4",
       "--n-samples-per-prompt", "4", "--num-steps-per-rollout", "2", "--rollout-max-response-len", "41", "--no-bf16",
       "--use-dynamic-batch-size", "--max-tokens-per-gpu", "96", "--trainer-host", "process", "--advantage-estimator",
       "grpo", "--no-rewards-normalization", "--lr", "5e-4", "--weight-decay", "0.1", "--optimizer", "muon")  # fmt: skip
TP, PP, EP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--expert-model-parallel-size"
LAYOUTS = {
    "tp2": (2, "qwen3", TP, 2),
    "pp2": (2, "qwen3", PP, 2),
    "dp2": (2, "qwen3"),
    "ep2": (2, "qwen3_moe", EP, 2),
    "tp2-moe": (2, "qwen3_moe", TP, 2),
    "dp2-moe": (2, "qwen3_moe"),
}  # fmt: skip
LOSS, WEIGHTS = 2e-6, 1e-5


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """(*flags, kind) -> the plan of a run."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("muon")
    for kind, more in {"qwen3": {}, "qwen3_moe": EXPERTS}.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **more)).save_pretrained(folder / kind)
    return lambda *flags, kind="qwen3": prepare(
        None, ["--hf-checkpoint", str(folder / kind), *RUN, *map(str, flags)])


@pytest.fixture(scope="module")
def train(plan, one, two, ranks_of):
    """(size, kind, *flags, which=, save=) -> what Ranks.train answers."""
    def run(size, kind, *flags, which=slice(0, 3), save=None):
        made = plan("--actor-num-gpus-per-node", size, *flags, kind=kind)
        return ranks_of(size).train(made, batches(3)[which], save=save)

    return run


@pytest.fixture(scope="module")
def alone(train):
    """kind -> six steps of one rank."""
    answers = {}
    return lambda kind: answers[kind] if kind in answers else answers.setdefault(kind, train(1, kind))


def gap(ours, theirs):
    return max(np.abs(ours["weights"][name] - value).max() for name, value in theirs["weights"].items())


def losses_apart(ours, theirs):
    return max(abs(one["train/loss"] - other["train/loss"]) for one, other in
               zip(ours["steps"], theirs["steps"], strict=True))


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_six_steps_are_those_of_the_trainer_fsdp(kind, train, alone, two):
    ours, theirs = alone(kind), train(1, kind, "--trainer", "fsdp")
    print(f"\n{kind}: loss {losses_apart(ours, theirs):.1e}, weights {gap(ours, theirs):.1e}")
    assert ours["weights"].keys() == theirs["weights"].keys()
    assert losses_apart(ours, theirs) <= LOSS and gap(ours, theirs) <= WEIGHTS


@pytest.mark.parametrize("name", LAYOUTS)
def test_six_steps_are_those_of_one_rank(name, train, alone):
    size, kind, *flags = LAYOUTS[name]
    several = train(size, kind, *flags)
    print(f"\n{name}: loss {losses_apart(several, alone(kind)):.1e}, weights {gap(several, alone(kind)):.1e}")
    assert losses_apart(several, alone(kind)) <= LOSS and gap(several, alone(kind)) <= WEIGHTS


@pytest.mark.parametrize("flags", [(), ("--bf16",)])
def test_a_resumed_run_goes_on_bit_for_bit(flags, train, tmp_path):
    straight = train(1, "qwen3", *flags)
    train(1, "qwen3", *flags, which=slice(0, 2), save=tmp_path)
    resumed = train(1, "qwen3", *flags, "--load", tmp_path, which=slice(2, 3))
    assert gap(resumed, straight) == 0


@pytest.mark.parametrize(("first", "second"), [
    ("one", "tp2"), ("tp2", "pp2"), ("pp2", "dp2"), ("dp2", "one"), ("one-moe", "ep2"), ("ep2", "one-moe"),
    ("ep2", "tp2-moe")])
def test_a_checkpoint_goes_from_layout_to_layout(first, second, train, alone, tmp_path):
    def run(name, *flags, **more):
        size, kind, *layout = LAYOUTS.get(name, (1, "qwen3_moe" if "moe" in name else "qwen3"))
        return train(size, kind, *layout, *flags, **more)

    expected = alone(LAYOUTS[first if first in LAYOUTS else second][1])
    run(first, which=slice(0, 2), save=tmp_path)
    resumed = run(second, "--load", tmp_path, which=slice(2, 3))
    print(f"\n{first} to {second}: weights {gap(resumed, expected):.1e}")
    assert gap(resumed, expected) <= WEIGHTS
