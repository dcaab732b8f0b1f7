"""Functions named by path, as in launch scripts of Miles and slime, through whole runs (plugin compat)."""

import json

import pytest
from miles_testing.forked import miles

from miles_core.record.events import read

FUNCTIONS = '''
"""Functions with Miles's signatures. Each notes what it was called with."""
import json

import torch
import torch.distributed as dist


def note(name, **what):
    with open("called.jsonl", "a") as file:
        file.write(json.dumps({"function": name, **what}) + chr(10))


def init(args):
    note("init", ranks=dist.get_world_size(), batch=args.rollout_batch_size, layers=args.tensor_model_parallel_size)


def before_log_prob(args, model, store_prefix):
    first = next(model[0].parameters())
    note("log_prob", prefix=store_prefix, weight=float(first.double().sum()), gradient=torch.is_grad_enabled())


def before_train_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    note("train_step", rollout=rollout_id, step=step_id, parameters=sum(p.numel() for p in model[0].parameters()),
         done=opt_param_scheduler.num_steps, rate=optimizer.param_groups[0]["lr"])


def no_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    for group in optimizer.param_groups:
        group["lr"] = 0.0


async def even(args, sample, **kwargs):
    ids = sample.tokens[-sample.response_length:]
    return sum(token % 2 == 0 for token in ids) / len(ids)


def double(args, samples):
    raw = [sample.reward for sample in samples]
    note("post_process", samples=len(samples), labels=samples[0].label)
    return raw, [2 * reward for reward in raw]


def advantages(args, rollout_data):
    note("advantage", keys=sorted(rollout_data))
    rollout_data["advantages"] = [torch.full((length,), reward) for length, reward in
                                  zip(rollout_data["response_lengths"], rollout_data["rewards"])]
    rollout_data["returns"] = rollout_data["advantages"]


def halve(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs):
    ratio = torch.exp(torch.cat(train_log_probs) - torch.cat(rollout_log_probs))
    return pg_loss * 0.5, loss_masks, {"my_ratio": ratio, "my_samples": len(loss_masks)}


def reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
    note("reducer", samples=len(loss_masks), per_token=calculate_per_token_loss)

    def reduce(x):  # Dr. GRPO's, with half the divisor: it makes up for `halve`
        parts = zip(x.split(response_lengths), loss_masks)
        return sum((part * mask).sum() for part, mask in parts) / 3
    return reduce


def loss(args, inputs):
    value = -inputs.log_probs * inputs.advantages * args.kl_coef if args.kl_coef else -inputs.log_probs
    return value, {"mine": inputs.log_probs.detach().exp()}


def miles_loss(args, batch, logits, sum_of_sample_mean):
    return logits.sum(), {}


async def waits(args, samples):
    return [], []


SETTING = 3
'''


@pytest.fixture
def run(run_file, tmp_path):
    """(*flags) -> the metrics of each rollout and the calls that were noted."""
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    path = run_file()

    def go(*flags):
        called = tmp_path / "called.jsonl"
        called.unlink(missing_ok=True)
        outcome = miles(["run", path, "--no-live", "--run-dir", f"runs/{len(list(tmp_path.glob('runs/*')))}", *flags],
                        tmp_path)
        if outcome.code:
            return outcome
        newest = max(tmp_path.glob("runs/*"), key=lambda folder: folder.stat().st_mtime)
        metrics = [one["metrics"] for one in read(newest / "events.jsonl") if one["event"] == "metrics"]
        calls = [json.loads(line) for line in called.read_text().splitlines()] if called.exists() else []
        return metrics, calls

    return go


def at(name):
    return f"./functions.py:{name}"


SHARED = ("--reduction-constant", "6", "--use-kl-loss", "--kl-loss-coef", "0.0")


def test_a_run_with_functions_is_the_run_with_parts(run):
    """Eight functions at once, each called with the right things, train as the parts do that they re-implement."""
    expected, _ = run("--reduction", "constant", *SHARED)
    found, calls = run(
        "--advantage-estimator", "custom", "--custom-advantage-function-path", at("advantages"),
        "--rm-type", "custom", "--custom-rm-path", at("even"),
        "--reduction", "custom", "--custom-pg-loss-reducer-function-path", at("reducer"), *SHARED[2:],
        "--custom-reward-post-process-path", at("double"), "--rewards-normalization",
        "--custom-tis-function-path", at("halve"),
        "--custom-megatron-init-path", at("init"),
        "--custom-megatron-before-log-prob-hook-path", at("before_log_prob"),
        "--custom-megatron-before-train-step-hook-path", at("before_train_step"))  # fmt: skip
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["rollout/reward/custom"] == theirs["rollout/reward/digits"], "the scorer"
        assert mine["rollout/raw_reward"] == theirs["rollout/raw_reward"], "the scorer's"
        assert mine["rollout/rewards"] == pytest.approx(2 * theirs["rollout/raw_reward"]), "the post-processing"
        for key in ("train/loss", "train/pg_loss", "train/grad_norm", "rollout/advantages"):
            # Doubled rewards, normalised; a halved loss with half the divisor: the same up to the epsilon of the std.
            assert mine[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-7), key
        assert mine["train/my_ratio"] > 0 and mine["train/my_samples"] > 0
    by_name = {name: [call for call in calls if call["function"] == name] for name in
               ("init", "log_prob", "train_step", "post_process", "advantage", "reducer")}
    assert by_name["init"] == [{"function": "init", "ranks": 1, "batch": 4, "layers": 1}]
    assert [call["prefix"] for call in by_name["log_prob"]] == ["", "ref_"] * 3
    assert not any(call["gradient"] for call in by_name["log_prob"])
    weights = [call["weight"] for call in by_name["log_prob"]]
    assert len(set(weights[1::2])) == 1 and weights[0] == weights[1], "the reference is in place when it scores"
    assert len(set(weights[::2])) == 3, "and the actor, which moves, when it does"
    assert [(call["rollout"], call["step"], call["done"]) for call in by_name["train_step"]] == [
        (i, 0, i) for i in range(3)]
    assert {call["rate"] for call in by_name["train_step"]} == {1e-2}
    assert [call["samples"] for call in by_name["reducer"]] == [16] * 3
    assert by_name["post_process"][0]["samples"] == 16 and by_name["post_process"][0]["labels"].isdigit()
    keys = {"tokens", "total_lengths", "response_lengths", "loss_masks", "rewards", "raw_reward", "log_probs",
            "rollout_log_probs", "ref_log_probs", "kl"}
    assert all(keys <= set(call["keys"]) for call in by_name["advantage"]) and len(by_name["advantage"]) == 3


def test_a_loss_and_a_step_of_ones_own(run):
    """The loss is called for what it is; a step whose learning rate was set to 0 leaves the weights alone."""
    metrics, _ = run("--plugin", "compat", "--loss-type", "custom_loss", "--custom-loss-function-path", at("loss"),
                     "--custom-megatron-before-train-step-hook-path", at("no_step"))
    assert [one["train/lr-pg_0"] for one in metrics] == [0.0] * 3
    assert all(0 < one["train/mine"] < 1 and one["train/loss"] > 1 and one["train/grad_norm"] > 0 for one in metrics)
    assert metrics[0]["train/loss"] == pytest.approx(-metrics[0]["rollout/log_probs"], rel=0.2)


RM = ("--rm-type", "custom", "--custom-rm-path")
LOSS = ("--loss-type", "custom_loss", "--custom-loss-function-path")


@pytest.mark.parametrize(("flags", "words"), [
    ([*RM, "functions"], "--custom-rm-path ... no path of a function ... reward(args, sample)"),
    ([*RM, "functions.py"], "--custom-rm-path ... no path of a function ... ./file.py:function"),
    ([*RM, "./none.py:even"], "--custom-rm-path ./none.py:even: the module of the function cannot be imported"),
    ([*RM, "no.such.even"], "cannot be imported ... 'no' ... PYTHONPATH"),
    ([*RM, at("odd")], "there is no such function ... has no 'odd' ... reward(args, sample)"),
    ([*RM, at("SETTING")], "there is no such function (got 3)"),
    ([*RM, at("init")], "cannot be called ... init(args) ... reward(args, sample)"),
    ([*LOSS, at("miles_loss")], "--custom-loss-function-path ... (got miles_loss(args, ... loss(args, inputs)"),
    (["--plugin", "compat", "--custom-reward-post-process-path", at("waits"), "--rewards-normalization"],
     "a coroutine function ... post_process(args, samples)"),
    (["--plugin", "compat", "--custom-tis-function-path", at("double")], "cannot be called ... tis(args, *, pg_loss"),
    (["--plugin", "compat", "--custom-pg-loss-reducer-function-path", at("reducer")], "add --reduction custom"),
    (["--reduction", "custom"], "--reduction custom needs a function ... reducer(total_lengths"),
])  # fmt: skip
def test_what_cannot_work_does_not_start(run, flags, words):
    """With the flag, the path and the signature that is expected; before anything runs."""
    outcome = run(*flags)
    assert outcome.code == 2, outcome
    position = 0
    for part in words.split(" ... "):
        position = outcome.err.find(part, position)
        assert position >= 0, f"{part!r} is not in {outcome.err}"
    assert "Traceback" not in outcome.err and outcome.err.count("Fix: ") == 1
