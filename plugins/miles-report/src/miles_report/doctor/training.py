"""Rules of the training side: weights, log-probs, gradients, and what becomes of the policy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean, median

from miles_core.record.events import Kind
from miles_report.doctor.finding import Finding
from miles_report.doctor.record import WINDOW, Cause, Record, shown
from miles_report.doctor.rollout import LOST, looping, vocabulary

JITTER, WRONG = 1e-4, 1.0
"""KL divergence of equal weights: kernels may differ by the first, nothing but a wrong configuration by the second."""

STEEP = 10.0
"""Norm of a first gradient that is not tiny; ten times as much is an error."""


def not_loaded(run: Record) -> Iterator[Finding]:
    """A trainer that trains and never said what it loaded."""
    trains = run.owner("trainer") == "megatron" and not run.option("debug_rollout_only")
    if run.first is None or not trains or not run.logs("run.log"):
        return
    loaded = any(run.find("Loaded checkpoint from")) or any(
        "Loaded checkpoint from" in str(event.get("text")) for event in run.of(Kind.MESSAGE))
    if not loaded:
        yield Finding("error", 'no log has a line "Loaded checkpoint from"',
                      "the trainer's weights may be those that it was initialised with",
                      "give --hf-checkpoint, and --load or --ref-load where the weights lie", "logs/run.log:1")


def untrained(run: Record) -> Iterator[Finding]:
    """Plugins stand around the actor's step, and none has ever let it happen."""
    around = run.plan.get("order", {}).get("train_step")
    meant = int(run.option("num_critic_only_steps") or 0)
    stepped = any({"train/grad_norm", "train/loss"} & event["metrics"].keys() for event in run.metrics.values())
    if around and not stepped and not run.option("debug_rollout_only") and max(run.metrics, default=-1) >= meant:
        last_id, last = list(run.metrics.items())[-1]
        yield Finding("error", f"{len(run.metrics)} rollouts had no optimizer step of the actor",
                      "the weights are those that the run began with: a hook around the step that does not call "
                      "proceed() leaves it out", f"look at train_step of {', '.join(map(str, around))}",
                      run.where(last), last_id)


def first_kl(run: Record) -> Iterator[Finding]:
    """Actor and reference, or old and new policy, differ before anything was learnt."""
    if run.first is None or not _starts_from_reference(run):
        return
    metrics, single = run.first["metrics"], run.option("num_steps_per_rollout") in (None, 1)
    gaps = {}
    if single and not run.option("use_rollout_logprobs"):
        gaps["train/ppo_kl"] = metrics.get("train/ppo_kl")
    reference = metrics.get("rollout/ref_log_probs")
    if single and reference is not None:
        gaps["train/kl_loss"] = metrics.get("train/kl_loss")
    if reference is not None and metrics.get("rollout/log_probs") is not None:
        gaps["rollout/log_probs - rollout/ref_log_probs"] = metrics["rollout/log_probs"] - reference
    gaps = {name: abs(value) for name, value in gaps.items() if value}
    if not gaps:
        return
    name, worst = max(gaps.items(), key=lambda item: item[1])
    severity = "note" if worst < JITTER else "error" if worst > WRONG else "warning"
    why = "both are the same weights then, so it has to be 0" + (" on a CPU" if run.on_cpu else "")
    if severity == "note":
        why += "; so little is jitter of kernels" + (", which a CPU does not have" if run.on_cpu else "")
    fix = {"note": "nothing, unless you need bits; --attention-backend flash is deterministic",
           "warning": "use deterministic kernels (--attention-backend flash), and see that --ref-load is what the run "
                      "starts from",
           "error": "look at --ref-load, at the parallel layout and at the precision: one of them is wrong"}[severity]
    if 0.3 <= worst <= 1.5:
        fix += "; about 0.8 per token on an instruct model is a chat template that does not match: miles check-template"
    yield Finding(severity, f"{name} is {worst:.3g} at the first optimizer step", why, fix, run.where(run.first), 0)


def disagreement(run: Record) -> Iterator[Finding]:
    """Engine and trainer give the same tokens other log-probs, from the start."""
    gap = run.first["metrics"].get("train/train_rollout_logprob_abs_diff") if run.first else None
    if gap is None or run.supervised or run.option("num_steps_per_rollout") not in (None, 1):
        return
    exact = run.option("bf16") is False and run.owner("engine") == "local"
    limit, wrong = (1e-3, 0.1) if exact else (0.1, 0.5)
    replay = "; for a mixture of experts, --use-rollout-routing-replay" if run.experts and not _routed(run) else ""
    if gap > limit:
        yield Finding(
            "error" if gap > wrong else "warning",
            f"the trainer's log-probs are {gap:.3g} per token from the engine's in the first rollout",
            "the two do not hold the same weights, do not see the same tokens, or compute in other precisions",
            "run once with --check-weight-update-equal, and miles check-template; for what precision leaves, "
            f"--fp32-lm-head or the plugin tis{replay}",
            run.where(run.first), 0, side="both")


def first_gradient(run: Record) -> Iterator[Finding]:
    """The first gradient is large."""
    norm = run.first["metrics"].get("train/grad_norm") if run.first else None
    if norm is None or norm <= STEEP or run.supervised or run.option("num_steps_per_rollout") not in (None, 1):
        return
    advice = "try --moe-permute-fusion; " if run.experts else ""
    yield Finding("error" if norm > 10 * STEEP else "warning", f"the first gradient has norm {norm:.3g}",
                  f"a good checkpoint with one step per rollout gives a small one; --clip-grad "
                  f"{run.option('clip_grad', 1.0)} only hides it",
                  f"see that rewards are right (--label-key) and that the two sides' log-probs agree; {advice}"
                  "then bisect with --load-debug-rollout-data", run.where(run.first), 0)


def explosion(run: Record) -> Iterator[Finding]:
    """The gradient, or the loss, grows without end."""
    for name in ("train/grad_norm", "train/loss"):
        values = [(rollout_id, abs(value)) for rollout_id, value in run.series(name)]
        if len(values) < 2 * WINDOW:
            continue
        before, last = median(value for _, value in values[:-WINDOW]), values[-1][0]
        now = median(value for _, value in values[-WINDOW:])
        if now > 100 * max(before, 0.01):
            low = any(run.option(key) for key in ("fp8", "fp8_format", "fp8_recipe"))
            advice = "; for FP8, --fp8-recipe blockwise with NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1" if low else ""
            yield Finding("error", f"{name} was {before:.3g} and is {now:.3g}", "the run is falling apart",
                          f"go back to a checkpoint from before and lower --lr, to 5e-7 say{advice}",
                          run.where(run.metrics[last]), last)


def non_finite(run: Record) -> Iterator[Finding]:
    """NaN or infinity: in a metric, or as the run's end."""
    if run.cause is Cause.NON_FINITE:
        engine = "engine" in run.error
        yield Finding("error", f"the run ended with: {run.said}",
                      "it did not reach the optimizer: the last checkpoint is good",
                      run.remedy("look at the engine's log and its precision") if engine else
                      run.remedy("look at the precision (FP8, --no-bf16), the chat template, and --lr"),
                      run.where(run.end), side="rollout" if engine else None)
    marked = [event for event in run.events if event.get("nonfinite")]
    if marked:
        first, names = marked[0], list(dict.fromkeys(str(name).removeprefix("metrics.") for event in marked
                                                     for name in event["nonfinite"]))
        rollout = all(name.startswith(("rollout/raw", "rollout/reward", "rollout/rollout_log_probs", "eval/"))
                      for name in names)
        yield Finding("error", f"{', '.join(names[:4])} not finite, first at rollout {first['rollout_id']}, in "
                      f"{len(marked)} event{'s' if len(marked) > 1 else ''}",
                      "a bad chat template or an overflow of activations in a low precision comes first",
                      "train that rollout alone (--load-debug-rollout-data) with --no-bf16; lower --lr",
                      run.where(first), first["rollout_id"], side="rollout" if rollout else None)


def uncorrected(run: Record) -> Iterator[Finding]:
    """Samples of older weights, and nothing that corrects for their age."""
    shares = [share for _, share in run.series("rollout/off_policy_tokens")]
    corrected = any(map(run.option, ("use_rollout_logprobs", "use_tis", "use_rs", "custom_tis_function_path")))
    if corrected or not shares or (share := fmean(shares)) <= 0.5:
        return
    last_id, last = list(run.metrics.items())[-1]
    yield Finding("warning", f"{share:.0%} of the trained tokens are of older weights, and nothing corrects for it",
                  "ratios are those to the weights before the step, so an old token counts as one of now; a policy can "
                  "forget what it knew", "write --use-rollout-logprobs, or --use-tis", run.where(last), last_id)


def experts_collapse(run: Record) -> Iterator[Finding]:
    """A mixture of experts whose two sides route differently, and whose reward falls for it."""
    reward, gap = _fall(run), run.ends("train/train_rollout_logprob_abs_diff")
    if not run.experts or _routed(run) or reward is None or gap is None or gap[1] < 2 * max(gap[0], 1e-4):
        return
    last_id, last = list(run.metrics.items())[-1]
    yield Finding("error", f"the reward fell from {reward[0]:.3g} to {reward[1]:.3g} while the log-prob difference of "
                  f"engine and trainer grew from {gap[0]:.3g} to {gap[1]:.3g}; the model has {run.experts} experts",
                  "the trainer routes tokens to other experts than the engine did, which ends most such runs",
                  "replay the engine's routing (--use-rollout-routing-replay); until then --use-tis and a lower --lr",
                  run.where(last), last_id)


def reward_falls(run: Record) -> Iterator[Finding]:
    """The reward goes down for good."""
    reward, gap = _fall(run), run.ends("train/train_rollout_logprob_abs_diff")
    if reward is None or any(experts_collapse(run)):
        return
    last_id, last = list(run.metrics.items())[-1]
    apart = gap is not None and gap[1] > 2 * max(gap[0], 1e-2)
    yield Finding("warning", f"the reward fell from {reward[0]:.3g} at best to {reward[1]:.3g}"
                  + (f", and the two sides' log-probs part: {shown(gap)}" if apart else ""),
                  "the policy trains itself away from what the reward asks for",
                  "correct for the mismatch with the plugin tis" if apart else
                  "lower --lr, or hold the policy near the reference with --use-kl-loss and --kl-loss-coef",
                  run.where(last), last_id)


def collapse(run: Record) -> Iterator[Finding]:
    """A policy that was fine and now writes noise, or always the same."""
    if len(run.metrics) < 2 or run.first is None:
        return
    rollout_id, last = list(run.metrics.items())[-1]
    before, samples = run.first["metrics"].get("rollout/rollout_log_probs"), run.samples(rollout_id)
    now = last["metrics"].get("rollout/rollout_log_probs")
    even = math.log(max(2, vocabulary(run, samples)))
    if now is not None and before is not None and -now > LOST * even >= -before:
        yield Finding("error", f"a token's mean log-prob went from {before:.2f} to {now:.2f}, near an even draw "
                      f"({-even:.2f})", "the policy writes noise now",
                      "go back to a checkpoint from before; lower --lr", run.where(last), rollout_id)
    elif (loops := looping(samples)) >= 0.5 and looping(run.samples(0)) < 0.5:
        yield Finding("error", f"{loops:.0%} of the answers repeat a few tokens to their end",
                      "the policy fell into a loop",
                      "go back to a checkpoint from before; lower --lr, and see that such answers score nothing",
                      run.where(last), rollout_id)
    entropy = run.ends("train/entropy_loss")
    if entropy is not None and entropy[1] < entropy[0] / 10:
        yield Finding("warning", f"the entropy fell from {entropy[0]:.3g} to {entropy[1]:.3g}",
                      "all answers of a group become the same, and there is nothing left to compare",
                      "raise --eps-clip-high or --entropy-coef; lower --lr", run.where(last), rollout_id)


def trainer_oom(run: Record) -> Iterator[Finding]:
    """The trainer has too little memory; in its second step, because the engine left too little."""
    ends = [event for event in run.of(Kind.RESTART) if "out of memory" in str(event.get("error"))]
    if run.cause is Cause.MEMORY and "engine" not in run.error.partition(":")[0]:
        ends.append(run.end)
    if not ends:
        return
    text = str(ends[-1]["error"])
    if run.option("colocate") and len(run.metrics) >= 1:
        yield Finding("error", f"after {len(run.metrics)} rollouts that went well: {text}",
                      "with --colocate the trainer takes its memory back from the engine, which kept too much",
                      "lower --sglang-mem-fraction-static to 0.7, then 0.6", run.where(ends[-1]), side="both")
    else:
        yield Finding("error", f"the trainer ran out of memory: {text}", "a step needs more than the device has",
                      "follow the order of the error; --max-tokens-per-gpu at least as large as the longest answer "
                      "keeps a single sample from exceeding it", run.where(ends[-1]))


def _routed(run: Record) -> bool:
    """Whether the trainer's routers replay, and what they replay is the engine's routing, not the trainer's own."""
    own = run.option("use_routing_replay") and not run.option("use_rollout_routing_replay")
    return bool(run.option("moe_enable_routing_replay")) and not own


def _starts_from_reference(run: Record) -> bool:
    """Whether actor and reference are the same weights at the first rollout, as far as the record tells."""
    starts = run.of(Kind.RUN_START)
    if not starts or starts[0].get("resumed_from"):
        return False
    reference = str(run.option("ref_load") or run.option("hf_checkpoint"))
    loaded = [line.text.partition("Loaded checkpoint from ")[2] for line in run.find("Loaded checkpoint from",
                                                                                       within="run.log")]
    return not loaded or loaded[0].split(" (")[0].rstrip("/") == reference.rstrip("/")


def _fall(run: Record) -> tuple[float, float] | None:
    """(best, latest) mean reward over WINDOW rollouts, if the second is below half of the first and stays low."""
    values = [value for _, value in run.series("rollout/raw_reward")]
    if len(values) < 3 * WINDOW:
        return None
    means = [fmean(values[i:i + WINDOW]) for i in range(len(values) - WINDOW + 1)]
    best, last = max(means), means[-1]
    spread = max(values[-WINDOW:])
    return (best, last) if best > 0 and last < best / 2 and spread < best else None
