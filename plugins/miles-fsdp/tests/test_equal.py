"""Six optimizer steps are the same on any number of ranks, and those of Megatron's trainer.

Three rollouts of two steps of GRPO with a KL loss on packed samples of unequal lengths: losses to 2e-6, weights to
1e-5, and every other metric that the expected side has.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from miles_megatron.testing.ranks import batches

from miles_core.errors import CheckpointError
from miles_core.plugins.plan import prepare

pytestmark = pytest.mark.xdist_group("fsdp")  # one worker: the processes are started once

LOSS, WEIGHTS = 2e-6, 1e-5
CONSTANTS = dict(vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=8, max_position_embeddings=128, eos_token_id=258, pad_token_id=7)
RUN_FILE = """
plugins = ["grpo"]
[rollout]
prompt_data = "data/none.jsonl"
num_rollout = 3
rollout_batch_size = 4
n_samples_per_prompt = 4
num_steps_per_rollout = 2
rollout_max_response_len = 41
[perf]
bf16 = false
use_dynamic_batch_size = true
max_tokens_per_gpu = 96
trainer_host = "process"
[algorithm]
use_kl_loss = true
kl_loss_coef = 0.05
rewards_normalization = false
entropy_coef = 0.001
[optimizer]
lr = 5e-4
weight_decay = 0.1
lr_decay_style = "cosine"
lr_warmup_iters = 2
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("equal")
    torch.manual_seed(0)
    models = {"qwen3": Qwen3ForCausalLM(Qwen3Config(**CONSTANTS, tie_word_embeddings=True)),
              "llama": LlamaForCausalLM(LlamaConfig(**CONSTANTS, tie_word_embeddings=False)),
              "other": Qwen3ForCausalLM(Qwen3Config(**CONSTANTS, tie_word_embeddings=True))}
    for name, model in models.items():
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:  # so large that another mask shows
                    parameter.mul_(3)
            model.get_input_embeddings().weight[CONSTANTS["pad_token_id"]].normal_(0, 0.06)  # it begins as zeros
        model.save_pretrained(folder / name)
    (folder / "run.toml").write_text(RUN_FILE)
    return folder


@pytest.fixture(scope="module")
def train(folder, one, two, ranks_of):
    """(trainer, model, ranks, *flags) -> what Ranks.train answers; of one rank without flags it is remembered."""
    known = {}

    def run(trainer, model, size=1, *flags):
        key = trainer, model, size, *flags
        if key not in known:
            argv = ["--trainer", trainer, "--hf-checkpoint", str(folder / model),
                    "--actor-num-gpus-per-node", str(size), *flags]
            known[key] = ranks_of(size).train(prepare(folder / "run.toml", argv), batches(3))
        return known[key]

    run.ranks = ranks_of
    return run


def same(found, expected):
    """Losses, norms, learning rates and scores of all steps, and the weights at the end."""
    def gap(key):
        return max(abs(a[key] - b[key]) for a, b in zip(found["steps"], expected["steps"], strict=True))

    weights = max(np.abs(found["weights"][name] - value).max() for name, value in expected["weights"].items())
    scores = max(np.abs(a.columns[name] - b.columns[name]).max() for name in ("log_probs", "ref_log_probs")
                 for a, b in zip(found["batch"].samples, expected["batch"].samples, strict=True))
    print(f"\nloss {gap('train/loss'):.1e}, norm {gap('train/grad_norm'):.1e}, weights {weights:.1e}, "
          f"log-probs {scores:.1e}")
    assert len(found["steps"]) == 6 and found["weights"].keys() == expected["weights"].keys()
    assert gap("train/loss") <= LOSS and gap("train/grad_norm") <= 1e-5 and weights <= WEIGHTS and scores <= 1e-4
    others = {name: gap(name) for name in expected["steps"][1] if name.startswith(("train/", "rollout/"))}
    assert max(others.values()) <= 1e-4 and others["train/lr-pg_0"] <= 1e-12, others


@pytest.mark.parametrize("model", ["qwen3", pytest.param("llama", marks=pytest.mark.full)])
def test_one_rank_is_megatrons_trainer(train, model):
    ours, theirs = train("fsdp", model), train("megatron", model)
    same(ours, theirs)
    assert all(step["train/ppo_kl"] == 0 for step in ours["steps"][::2])  # the pass and the step have the same bits


@pytest.mark.full  # 11 CPU s on two ranks
@pytest.mark.parametrize("size", [2, 4])
def test_several_ranks_are_one(train, size):
    one, several = train("fsdp", "qwen3"), train("fsdp", "qwen3", size)
    same(several, one)
    assert several["steps"][0].keys() == one["steps"][0].keys()


@pytest.mark.full
@pytest.mark.parametrize(("size", "more"), [(2, ()), (4, ()), (2, ("--gradient-checkpointing",))])
def test_ranks_that_share_projections_are_one(train, size, more):
    """In pairs; two pairs have samples of their own."""
    one = train("fsdp", "qwen3")
    several = train("fsdp", "qwen3", size, "--fsdp.tensor-parallel-size", "2", *more)
    same(several, one)
    assert several["steps"][0].keys() == one["steps"][0].keys()


@pytest.mark.full
@pytest.mark.parametrize(("size", "context"), [(2, 2), (4, 2), (4, 4)])
def test_ranks_that_share_rows_are_one(train, size, context):
    """Two groups of keys for four ranks, among them."""
    one = train("fsdp", "qwen3")
    several = train("fsdp", "qwen3", size, "--fsdp.context-parallel-size", str(context), "--max-tokens-per-gpu",
                    str(96 // context))
    same(several, one)
    assert several["steps"][0].keys() == one["steps"][0].keys()


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_trainer_that_leaves_its_device_between_calls_takes_the_same_steps(train, folder, size):
    """Weights, gradients and the optimizer's state, bit for bit; while weights stream, they alone are there."""
    stayed = train("fsdp", "qwen3", size)
    plan = prepare(folder / "run.toml", ["--trainer", "fsdp", "--hf-checkpoint", str(folder / "qwen3"),
                                         "--actor-num-gpus-per-node", str(size)])
    left = train.ranks(size).train(plan, batches(3), turns=True)
    assert [step["train/loss"] for step in left["steps"]] == [step["train/loss"] for step in stayed["steps"]]
    assert all(np.array_equal(left["weights"][name], value) for name, value in stayed["weights"].items())


ONE = '''
"""A metric that is 1 at each token."""
import dataclasses

from miles_core import hookimpl


class One:
    """Watches."""

    @hookimpl
    def token_weights(self, weights, inputs):
        return dataclasses.replace(weights, metrics={"one": inputs.mask})
'''


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.full)])
def test_samples_without_advantage_can_be_left_out(train, folder, size):
    """The steps are those of all samples: a reward of 0 is an advantage of 0 here, for a third of them."""
    (folder / "one.py").write_text(ONE)
    silent = ("--no-use-kl-loss", "--entropy-coef", "0", "--plugin", str(folder / "one.py"))
    fewer, whole = train("fsdp", "qwen3", size, *silent, "--skip-zero-advantages"), train("fsdp", "qwen3", 1, *silent)
    skipped = [step.get("train/skipped_samples", 0) for step in fewer["steps"]]
    assert sum(skipped) / len(skipped) > 0.2, skipped
    for found in (fewer, whole):
        assert [step["train/one"] for step in found["steps"]] == pytest.approx([1] * 6), "a mean of what was computed"
        first, last = found["steps"][-2:]
        assert "perf/actor_train_tok_per_s" in last.keys() - first.keys(), "a rate is that of all steps"
        tokens = last["perf/actor_train_tok_per_s"] * sum(step["perf/actor_train_time"] for step in (first, last))
        assert tokens == pytest.approx(sum(s.length for s in found["batch"].samples
                                           if found is whole or s.columns["advantages"].any()))
    for name in ("train/loss", "train/grad_norm"):
        assert max(abs(a[name] - b[name]) for a, b in zip(fewer["steps"], whole["steps"], strict=True)) <= 1e-5, name
    assert all(np.abs(fewer["weights"][name] - value).max() <= WEIGHTS for name, value in whole["weights"].items())


@pytest.mark.full
@pytest.mark.parametrize("trainer", ["megatron", "fsdp"])
def test_as_many_samples_are_left_out_of_micro_batches_of_a_fixed_size_on_any_number_of_ranks(train, trainer):
    """What fills their micro-batches is in no metric; samples did, and so the metrics depended on the ranks."""
    flags = ("--no-use-kl-loss", "--entropy-coef", "0", "--skip-zero-advantages",
             "--no-use-dynamic-batch-size", "--micro-batch-size", "2")
    one, two = (train(trainer, "qwen3", size, *flags)["steps"] for size in (1, 2))
    assert any(step["train/skipped_samples"] * 8 % 4 for step in one), "so that two ranks have to fill"
    for name in ("train/skipped_samples", "train/loss", "train/grad_norm", "train/pg_clipfrac", "train/ppo_kl"):
        assert [step[name] for step in two] == pytest.approx([step[name] for step in one], abs=1e-5), name


@pytest.mark.parametrize("trainer", ["megatron", "fsdp"])
def test_samples_that_ranks_cannot_divide_are_trained_on_as_one_rank_does(train, folder, trainer):
    """Each alone in a micro-batch, 7 and 8 of them in a step: a rank has one more than it has samples."""
    found = {}
    for size in (1, 2):
        given = batches(1)
        del given[0].groups[0].samples[1]
        plan = prepare(folder / "run.toml", ["--trainer", trainer, "--hf-checkpoint", str(folder / "qwen3"),
                                             "--actor-num-gpus-per-node", str(size), "--max-tokens-per-gpu", "1"])
        found[size] = train.ranks(size).train(plan, given)
    one, two = found[1], found[2]
    assert len(one["batch"].samples) == 15
    for name in ("train/loss", "train/grad_norm", "train/kl_loss", "train/entropy_loss", "rollout/log_probs"):
        values = [[step[name] for step in each["steps"] if name in step] for each in (one, two)]
        assert values[0] == pytest.approx(values[1], abs=1e-5) and values[0], name
    for mine, theirs in zip(one["batch"].samples, two["batch"].samples, strict=True):
        assert mine.columns["log_probs"] == pytest.approx(theirs.columns["log_probs"], abs=1e-4)
    assert all(np.abs(two["weights"][name] - value).max() <= WEIGHTS for name, value in one["weights"].items())


PPO = ("--advantage-estimator", "ppo", "--lambd", "0.9", "--critic-lr", "1e-3", "--adam-eps", "1e-6")


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_critic_is_megatrons(train, size):
    """Values before each rollout's steps and losses behind them; the actor learns from what its critic says."""
    ours, theirs = train("fsdp", "llama", size, *PPO), train("megatron", "llama", 1, *PPO)
    same(ours, theirs)
    for name in ("critic/loss", "critic/value_loss", "critic/grad_norm", "critic/lr-pg_0", "rollout/values"):
        gaps = [abs(a[name] - b[name]) for a, b in zip(ours["steps"], theirs["steps"], strict=True)]
        assert max(gaps) <= 1e-5, name
    assert {name for name in ours["steps"][0] if name.startswith("critic/")} == {
        name for name in theirs["steps"][0] if name.startswith("critic/")}
    assert len({step["rollout/values"] for step in ours["steps"]}) == 3, "it learns between rollouts"


@pytest.mark.full
@pytest.mark.parametrize("saver", [1, 2])
def test_a_run_with_a_critic_goes_on_where_it_was(train, folder, tmp_path, saver):
    """To the bit on one rank, up to the order of sums from two; without the plugin it is another model's checkpoint."""
    [first, *rest] = batches(3)

    def on(size, *flags):
        argv = ["--trainer", "fsdp", "--hf-checkpoint", str(folder / "llama"), "--actor-num-gpus-per-node", str(size)]
        return train.ranks(size), prepare(folder / "run.toml", [*argv, *flags])

    ranks, plan = on(saver, *PPO)
    ranks.train(plan, [first], save=tmp_path)
    ranks, plan = on(1, *PPO, "--load", str(tmp_path))
    resumed, straight = ranks.train(plan, rest), train("fsdp", "llama", 1, *PPO)
    for name, weight in straight["weights"].items():
        np.testing.assert_allclose(resumed["weights"][name], weight, rtol=0, atol=0 if saver == 1 else WEIGHTS)
    for ours, theirs in zip(resumed["steps"], straight["steps"][2:], strict=True):
        assert ours["critic/loss"] == pytest.approx(theirs["critic/loss"], abs=0 if saver == 1 else LOSS)
        assert ours["critic/lr-pg_0"] == theirs["critic/lr-pg_0"]
    ranks, plan = on(1, "--load", str(tmp_path))
    with pytest.raises(CheckpointError) as caught:
        ranks.train(plan, rest)
    assert caught.value.code == "fsdp-checkpoint-unreadable" and "critic" in str(caught.value)


@pytest.mark.parametrize("trainer", [pytest.param("megatron", marks=pytest.mark.full), "fsdp"])
def test_an_actor_that_has_taken_no_step_is_saved_as_such(train, folder, tmp_path, trainer):
    """Its critic warms up. Bit for bit; AdamW scales steps by their number, and its schedule counts its own."""
    flags = ("--trainer", trainer, "--hf-checkpoint", str(folder / "llama"), *PPO, "--num-critic-only-steps", "1")
    [first, *rest] = batches(3)
    straight = train(trainer, "llama", 1, *PPO, "--num-critic-only-steps", "1")
    train.ranks(1).train(prepare(folder / "run.toml", flags), [first], save=tmp_path)
    resumed = train.ranks(1).train(prepare(folder / "run.toml", [*flags, "--load", str(tmp_path)]), rest)
    assert all(np.array_equal(resumed["weights"][name], weight) for name, weight in straight["weights"].items())
    rates = [step["train/lr-pg_0"] for step in train(trainer, "llama", 1, *PPO)["steps"]]
    for steps in (straight["steps"][2:], resumed["steps"]):
        assert [step["train/lr-pg_0"] for step in steps] == rates[:4]


@pytest.mark.parametrize("trainer", ["megatron", "fsdp"])
@pytest.mark.parametrize(("before", "now"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.full)])
def test_a_resume_with_another_batch_has_the_rates_of_a_run_that_had_it_all_along(train, folder, tmp_path, trainer,
                                                                                before, now):
    """Twice the batch is half as many steps: counted in those done before it, the schedule would be at its end."""
    rollouts = batches(3)

    def rates(which, count, *flags, **save):
        argv = ["--trainer", trainer, "--hf-checkpoint", str(folder / "qwen3"), "--num-steps-per-rollout", str(count)]
        found = train.ranks(1).train(prepare(folder / "run.toml", [*argv, *flags]), rollouts[which], **save)
        return [step["train/lr-pg_0"] for step in found["steps"]]

    rates(slice(0, 2), before, save=tmp_path)
    resumed = rates(slice(2, 3), now, "--load", str(tmp_path))
    assert resumed == rates(slice(0, 3), now)[2 * now:]


@pytest.mark.parametrize("trainer", ["megatron", "fsdp"])
def test_a_run_that_loads_the_models_folder_starts_there_beside_another_reference(train, folder, trainer):
    """Without --load it starts from the reference."""
    model, other = str(folder / "qwen3"), str(folder / "other")
    plain = train(trainer, "qwen3")["steps"][0]
    step = train(trainer, "qwen3", 1, "--load", model, "--ref-load", other)["steps"][0]
    assert step["rollout/log_probs"] == plain["rollout/log_probs"]
    assert step["rollout/ref_log_probs"] != plain["rollout/ref_log_probs"]


def test_weights_without_the_optimizer_are_no_resume(train, folder, tmp_path):
    argv = ["--trainer", "fsdp", "--hf-checkpoint", str(folder / "qwen3")]
    train.ranks(1).train(prepare(folder / "run.toml", [*argv, "--no-save-optim"]), batches(1), save=tmp_path)
    with pytest.raises(CheckpointError) as caught:
        train.ranks(1).train(prepare(folder / "run.toml", [*argv, "--load", str(tmp_path)]), batches(1))
    assert caught.value.code == "fsdp-checkpoint-without-optimizer"


@pytest.mark.full  # 20 CPU s
@pytest.mark.parametrize("flags", [(), ("--gradient-checkpointing",)], ids=["kept", "again"])
def test_compiled_layers_change_nothing(train, flags):
    """The reference's are compiled, too."""
    same(train("fsdp", "qwen3", 1, "--torch-compile", "--torch-compile-backend", "aot_eager", *flags),
         train("fsdp", "qwen3"))


@pytest.mark.full
def test_layers_that_are_computed_again_change_nothing(train):
    same(train("fsdp", "qwen3", 1, "--gradient-checkpointing"), train("fsdp", "qwen3"))
