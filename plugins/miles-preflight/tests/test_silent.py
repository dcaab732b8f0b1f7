"""Every check that prevents silent damage: the flags that it refuses, whom it names, and the damage without it."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from miles_grpo.advantage import normalized
from miles_local.sampling import Draws, StopStrings, draw
from miles_megatron import cpu
from miles_reinforce.advantage import discounted

from miles_core.config.tables import Algorithm
from miles_core.errors import ConfigError
from miles_core.kl import approximate_kl
from miles_core.stages.advantage import kl_penalties
from miles_core.stages.loss import LossInputs, clipped_surrogate, reduce
from miles_core.stages.reward import weighted_sum

cpu.install()
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402 - after install()

OLD, NEW, REF = (torch.tensor(row, dtype=torch.float64).log() for row in ([0.5, 0.4], [0.9, 0.1], [0.3, 0.6]))
SGLANG = ("--engine", "sglang")
TWICE = ("--kl-coef", 0.1, "--use-kl-loss", "--kl-loss-coef", 0.1)
SKIP = "--skip-actor-forward-only"
PPO = ("--plugin", "ppo", "--advantage-estimator", "ppo")


def surrogate(old=OLD, new=NEW, advantage=1.0, low=0.2, high=0.28):
    """(gradient of the new log-probs, share that is clipped) of a policy that has moved."""
    new = new.clone().requires_grad_()
    inputs = LossInputs(
        log_probs=new, entropy=None, old_log_probs=old, rollout_log_probs=old, ref_log_probs=None,
        advantages=torch.full_like(old, advantage), mask=torch.ones_like(old), sample=torch.zeros(2, dtype=torch.int64),
        segment_sum=lambda values: values.sum(0, keepdim=True), rows={}, eps_clip=low, eps_clip_high=high,
        eps_clip_c=None)  # fmt: skip
    loss, metrics = clipped_surrogate(inputs)
    loss.sum().backward()
    return new.grad, metrics["pg_clipfrac"].mean().item()


def penalty(**algorithm):
    """The KL term of the reward of one sample."""
    columns = {"log_probs": NEW.numpy(), "ref_log_probs": REF.numpy(), "loss_mask": np.ones(2)}
    batch = SimpleNamespace(samples=[SimpleNamespace(columns=columns, response_length=2)])
    return kl_penalties(batch, Algorithm(kl_loss_type="k3", **algorithm))[0].sum()


def drawn(temperature=1.0, top_p=1.0, top_k=-1):
    """Tokens of 64 answers to one prompt."""
    same = {"temperature": (temperature, np.float32), "top_p": (top_p, np.float32), "top_k": (top_k, np.int64)}
    draws = Draws(**{name: np.full(64, value, kind) for name, (value, kind) in same.items()},
                  uniform=np.random.default_rng(0).random(64))
    return draw(torch.tensor([[1.0, 0.9, 0.8, 0.7]]).repeat(64, 1), draws)[0]


def spoken(stop):
    """Tokens of "7 apples" until a stop string ends the answer."""
    watch = StopStrings(SimpleNamespace(decode=lambda ids, skip_special_tokens: "".join(ids)), (stop,), False)
    return next((place for place, token in enumerate(["7", " ", "apples"], 1) if watch.hit(token)), 3)


def accepted(threshold):
    """Distribution of a token that was drafted from q, of a policy p, by the rule of speculative sampling."""
    p, q = np.array([0.9, 0.1]), np.array([0.5, 0.5])
    keep = np.minimum(1, p / (q * threshold))
    rest = np.maximum(p - q, 0)
    return q * keep + (1 - (q * keep).sum()) * rest / rest.sum()


def passes(noise):
    """Log-probs of one token in two passes of one model, with dropout."""
    torch.manual_seed(0)
    weight, hidden = torch.randn(8, 16), torch.randn(16)
    return [F.log_softmax(weight @ F.dropout(hidden, noise), 0)[0].item() for _ in range(2)]


def moved(step, weight=0.02):
    """A float32 weight after one step of Adam, which is about as large as the learning rate."""
    return abs((np.float32(weight) - np.float32(step)) / np.float32(weight) - 1)


def rates(steps, **schedule):
    """Learning rates of the steps, of 1 at most, by Megatron's scheduler."""
    groups = [{"max_lr": 1.0, "min_lr": 0.0}]
    scheduler = OptimizerParamScheduler(
        SimpleNamespace(param_groups=groups), init_lr=0.0, max_lr=1.0, min_lr=0.0, start_wd=0.0, end_wd=0.0,
        wd_incr_steps=0, wd_incr_style="constant", **schedule)
    values = []
    for _ in range(steps):
        scheduler.step(1)
        values.append(groups[0]["lr"])
    return values


def scored(*weights):
    """Reward of a right answer by a scorer that is named once for each weight."""
    return weighted_sum(SimpleNamespace(rewards={"math": 1.0}), dict(zip(["math"] * len(weights), weights)))


def averaged():
    """What two ranks make of the sums of their tokens that the loss has divided by all tokens."""
    parts = [reduce(torch.ones(4), torch.full((4,), 1 / 8), torch.ones(4)).item() for _ in range(2)]
    return sum(parts) / 2, sum(parts)


SILENT = {
    "kl-counted-twice": (TWICE, "algorithm.kl_loss_coef", lambda: (
        math.isclose(0.1 * approximate_kl(NEW, REF, "k3").sum().item(), -penalty(kl_coef=0.1)))),
    "kl-that-drives-away": (("--kl-coef", -0.1), "algorithm.kl_coef", lambda: penalty(kl_coef=-0.1) > 0),
    "ratio-of-1-in-later-steps": ((SKIP, "--num-steps-per-rollout", 2), "algorithm.skip_actor_forward_only", lambda: (
        surrogate(old=NEW)[1] == 0 and surrogate()[1] == 0.5)),
    "band-beyond-every-ratio": (("--eps-clip", 1.5), "algorithm.eps_clip", lambda: (
        surrogate(advantage=-1.0, low=1.5)[1] == 0 and surrogate(advantage=-1.0)[1] == 0.5)),
    "band-above-every-ratio": (("--eps-clip-high", 20), "algorithm.eps_clip_high", lambda: surrogate(high=20)[1] == 0),
    "bounds-of-the-ratio-as-widths": (("--eps-clip", 0.8, "--eps-clip-high", 1.28), "algorithm.eps_clip", lambda: (
        surrogate(low=0.8, high=1.28)[1] == 0 and surrogate()[1] == 0.5)),
    "band-of-no-width": (("--eps-clip", 0, "--eps-clip-high", 0), "algorithm.eps_clip", lambda: (
        surrogate(new=OLD + 1e-6, low=0.0, high=0.0)[0].abs().max() == 0)),
    "band-upside-down": (("--eps-clip", -0.5), "algorithm.eps_clip", lambda: (
        surrogate(new=OLD, advantage=-1.0, low=-0.5)[1] == 1 and surrogate(new=OLD, advantage=-1.0)[1] == 0)),
    "steps-before-the-warm-up-ends": (("--lr-warmup-iters", 100), "optimizer.lr_warmup_iters", lambda: max(rates(
        3, lr_warmup_steps=100, lr_decay_steps=101, lr_decay_style="constant")) < 0.05),
    "steps-after-the-decay": (
        ("--num-rollout", 100, "--lr-decay-style", "linear", "--lr-decay-iters", 10), "optimizer.lr_decay_iters",
        lambda: not any(rates(100, lr_warmup_steps=0, lr_decay_steps=10, lr_decay_style="linear")[10:])),
    "scorer-that-counts-once": (("--rm-type", "math", "math"), "rollout.rm_type", lambda: scored(1.0, 1.0) == 1),
    "rewards-of-weight-0": (("--rm-weights", 0), "rollout.rm_weights", lambda: scored(0.0) == 0),
    "one-of-two-reductions": (("--calculate-per-token-loss", "--reduction", "sample"), "algorithm.reduction", lambda: (
        reduce(torch.ones(4), torch.tensor([1 / 2, 1 / 6, 1 / 6, 1 / 6]), torch.ones(4)) !=
        reduce(torch.ones(4), torch.full((4,), 1 / 4), torch.tensor([1.0, 1, 1, 0])))),
    "constant-that-turns-the-loss": (("--reduction", "constant", "--reduction-constant", -8),
                                     "algorithm.reduction_constant",
                                     lambda: reduce(torch.ones(4), torch.full((4,), 1 / -8), torch.ones(4)) < 0),
    "returns-without-bound": (("--gamma", 1.5), "algorithm.gamma", lambda: (
        discounted(np.eye(1, 64, 63)[0], 1.5)[0] > 1e10 and discounted(np.eye(1, 64, 63)[0], 1.0)[0] == 1)),
    "samples-of-temperature-0": (("--rollout-temperature", 0), "rollout.rollout_temperature", lambda: (
        len({*drawn(temperature=0)}) == 1 and len({*drawn()}) == 4 and not any(normalized([1.0] * 8)))),
    "samples-of-top-k-1": (("--rollout-top-k", 1), "rollout.rollout_top_k", lambda: len({*drawn(top_k=1)}) == 1),
    "samples-of-no-top-p": (("--rollout-top-p", 0.001), "rollout.rollout_top_p", lambda: (
        len({*drawn(top_p=0.001)}) == 1)),
    "answers-that-end-at-once": (("--rollout-stop", " "), "rollout.rollout_stop", lambda: (
        spoken(" ") == 2 and spoken("\n") == 3)),
    "answers-of-no-token": (("--rollout-max-response-len", 0), "rollout.rollout_max_response_len", lambda: (
        reduce(torch.ones(0), torch.ones(0), torch.ones(0)) == 0)),
    "steps-larger-than-weights": (("--lr", 1), "optimizer.lr", lambda: moved(1) > 1),
    "dropout-in-the-trainer": (("--attention-dropout", 0.1), "megatron.attention_dropout", lambda: (
        len({*passes(0.5)}) == 2 and len({*passes(0.0)}) == 1)),
    "gradients-divided-twice": (("--average-in-collective",), "megatron.average_in_collective", lambda: (
        averaged() == (0.5, 1.0))),
    "drafts-that-the-policy-would-not-draw": (
        (*SGLANG, "--sglang-speculative-algorithm", "NGRAM", "--sglang-speculative-accept-threshold-single", 0.1),
        "server.speculative_accept_threshold_single",
        lambda: np.allclose(accepted(1.0), [0.9, 0.1]) and accepted(0.1)[1] > 0.4),
    "another-model-in-the-servers": (
        (*SGLANG, "--sglang-json-model-override-args", '{"hidden_act": "gelu"}'), "server.json_model_override_args",
        lambda: (F.gelu(torch.ones(1)) - F.silu(torch.ones(1))).abs() > 0.1),
    "sums-in-another-order": (
        (*SGLANG, "--sglang-enable-deterministic-inference", "--sglang-attention-backend", "torch_native"),
        "server.attention_backend", lambda: 0.1 + 0.2 + 0.3 != 0.3 + 0.2 + 0.1),
    "adapter-that-no-request-names": (
        (*SGLANG, "--sglang-lora-paths", "a=b"), "server.lora_paths",
        lambda: not torch.equal(torch.ones(2, 2), torch.ones(2, 2) + torch.ones(2, 1) @ torch.ones(1, 2))),
    "random-weights-served": ((*SGLANG, "--debug-rollout-only", "--sglang-load-format", "dummy"), "server.load_format",
                              lambda: not torch.equal(torch.rand(8), torch.rand(8))),
}  # fmt: skip


@pytest.mark.parametrize("name", SILENT)
def test_what_would_spoil_a_run_without_a_word_is_refused(plan, name):
    flags, key, damage = SILENT[name]
    with pytest.raises(ConfigError) as caught:
        plan(*flags)
    assert key in caught.value.who and caught.value.fix, caught.value
    assert damage()


@pytest.mark.parametrize("flag", ["--save", "--save-hf", "--run-dir"])
def test_nothing_is_written_over_what_the_run_reads(plan, tmp_path, flag):
    (tmp_path / "model").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "model")
    with pytest.raises(ConfigError) as caught:
        plan("--hf-checkpoint", tmp_path / "model", flag, tmp_path / "link")
    assert "checkpoint.hf_checkpoint" in caught.value.who
    (tmp_path / "link" / "config.json").write_text("{}")  # what an export would do
    assert (tmp_path / "model" / "config.json").is_file()


@pytest.mark.parametrize(("flags", "key"), [
    (("--save", "a", "--save-hf", "a"), "checkpoint.save_hf"),
    (("--save", "a", "--ref-load", "a", "--use-kl-loss"), "checkpoint.ref_load"),
    (("--load", "a", "--save", "a", "--no-save-optim"), "checkpoint.no_save_optim"),
    (("--save-debug-rollout-data", "a.pt"), "debug.save_debug_rollout_data"),
    (("--max-restarts", 1, "--save", "a", "--no-save-optim"), "checkpoint.no_save_optim"),
    (("--load-debug-rollout-data", "a/{rollout_id}", "--save-debug-rollout-data", "a/{rollout_id}"),
     "debug.save_debug_rollout_data"),
    ((*PPO, "--ppo.critic-load", "a", "--save", "a"), "ppo.critic_load"),
    ((*PPO, "--num-critic-only-steps", 2, "--lr-warmup-iters", 2), "optimizer.lr_warmup_iters"),
    ((*SGLANG, "--sglang-delete-ckpt-after-loading"), "server.delete_ckpt_after_loading"),
    ((*SGLANG, "--sglang-quantization", "fp8", "--engine-dtype", "bfloat16"), "server.quantization"),
    ((*SGLANG, "--sglang-checkpoint-engine-wait-weights-before-ready"),
     "server.checkpoint_engine_wait_weights_before_ready"),
])
def test_what_destroys_or_ends_a_run_late_is_refused(plan, flags, key):
    with pytest.raises(ConfigError) as caught:
        plan(*flags)
    assert key in caught.value.who


@pytest.mark.parametrize("flags", [
    ("--lr", 0), ("--eps-clip", 1), ("--load", "a", "--save", "a"),
    ("--save", "{run_dir}/a", "--save-hf", "{run_dir}/a/hf"),
    ("--rollout-temperature", 0, "--debug-rollout-only"), ("--eval-temperature", 0), (SKIP,), ("--kl-coef", 0.1),
    (*SGLANG, "--sglang-enable-deterministic-inference"), ("--rollout-stop", "\n"),
    (*SGLANG, "--sglang-quantization", "fp8", "--debug-rollout-only"),
    (*PPO, "--num-rollout", 10, "--num-critic-only-steps", 6, "--lr-decay-style", "linear", "--lr-decay-iters", 4),
    ("--plugin", "sft", "--generate", "sft", "--n-samples-per-prompt", 1, "--loss-type", "sft_loss", SKIP,
     "--num-steps-per-rollout", 2),
], ids=str)
def test_its_neighbour_is_planned(plan, flags):
    plan(*flags)
