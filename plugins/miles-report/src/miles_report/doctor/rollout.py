"""Rules of the rollout side: what is sampled, how it is scored, what the filters leave of it."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean

from miles_core.record.events import Kind
from miles_report.doctor.finding import Finding
from miles_report.doctor.record import WINDOW, Cause, Record

LOST = 0.5
"""Share of ln(vocabulary) at which an answer is drawn almost evenly from all tokens: a model that means something is
sure of most tokens, at about a tenth of that."""

LOOP, LOOP_KINDS = 32, 4
"""An answer whose last LOOP tokens are at most LOOP_KINDS different ones repeats itself."""

ELEVATED = 0.6
"""Nats per token at which an instruct model is less sure than in its own template: a wrong one costs about 0.8."""


def gibberish(run: Record) -> Iterator[Finding]:
    """The first answers are noise, or one token over and over."""
    if run.first is None:
        return
    samples, metrics = run.samples(0), run.first["metrics"]
    sampled = metrics.get("rollout/rollout_log_probs")
    sampled = _log_prob(samples) if sampled is None else sampled
    noise, loops = _noise(run, sampled, samples), looping(samples)
    if noise is None and loops < 0.5:
        return
    seen = [noise] if noise else []
    seen += [f"{loops:.0%} of the answers repeat a few tokens to their end"] if loops >= 0.5 else []
    if (cut := metrics.get("rollout/truncated_ratio")) is not None:
        seen.append(f"{cut:.0%} never end")
    gap = metrics.get("train/train_rollout_logprob_abs_diff_max")
    if noise and gap is not None and gap < 0.1:
        yield Finding(
            "error", f"the first rollout is gibberish: {', '.join(seen)}",
            "the trainer gives these tokens the same log-probs, so the engine has the trainer's weights: parameters "
            "were not loaded, or were mapped to wrong names",
            'see which checkpoint "Loaded checkpoint from" in logs/ names; correct --hf-checkpoint, --ref-load or '
            '--load, '
            "and try the instruct version of the same architecture", _first_line(run), 0, side="training")
        return
    differs = "" if gap is None else f", while the trainer's log-probs differ from the engine's by up to {gap:.3g}"
    yield Finding(
        "error", f"the first rollout is gibberish: {', '.join(seen)}{differs}",
        "an engine that lost weights or buffers, or a prompt unlike anything the model has seen, gives noise that "
        "training cannot repair",
        "run one rollout with --check-weight-update-equal, check the template with miles check-template, and lower "
        "--rollout-temperature if it is above 1", _first_line(run), 0)


def template(run: Record) -> Iterator[Finding]:
    """An instruct model that is unsure of its own answers: its prompts are not what it was trained on."""
    level = run.first["metrics"].get("rollout/rollout_log_probs") if run.first else None
    temperature = run.option("rollout_temperature", 1.0)
    if level is None or not ELEVATED <= -level < 3 or temperature != 1.0 or not _is_instruct(run):
        return
    rendered, own = run.option("apply_chat_template"), run.option("chat_template_path") is None
    how = ("prompts are not rendered with a chat template" if not rendered else
           "the template is one of your own" if not own else "the template is the checkpoint's own")
    yield Finding(
        "note" if rendered and own else "warning",
        f"the first answers have {-level:.2f} nats per token, and {how}",
        "an instruct model is surer of what it says; about 0.8 per token is what a chat-template mismatch costs",
        "run miles check-template on the checkpoint" + ("" if rendered else ", and pass --apply-chat-template"),
        run.where(run.first), 0)


def same_reward(run: Record) -> Iterator[Finding]:
    """Every answer of a group scores the same, so no group teaches anything."""
    shares = run.series("rollout/zero_std/percentage")
    if not shares or run.option("n_samples_per_prompt", 2) == 1 or run.supervised:
        return
    share = fmean(value for _, value in shares[-WINDOW:])
    if share < 0.9:
        return
    rollout_id, last = shares[-1][0], run.metrics[shares[-1][0]]
    every = all(value == 1 for _, value in shares)
    rewards = [value for _, value in run.series("rollout/raw_reward")]
    low, high = min(rewards, default=0.0), max(rewards, default=0.0)
    level = f"the mean reward is always {low:g}" if low == high else f"the mean reward is {low:.3g} to {high:.3g}"
    yield Finding(
        "error" if every else "warning",
        f"{'all' if every else f'{share:.0%} of the'} groups have one and the same reward; {level}"
        + _about_labels(run, rollout_id),
        "advantages compare the answers of a group: where all score the same they are 0, and so is the gradient",
        "a wrong --label-key or --rm-type comes first; else the task is too hard or too easy for the model: mix the "
        "prompts, or drop such groups with the plugin dapo-filter", run.where(last), rollout_id)


def silent_scorer(run: Record) -> Iterator[Finding]:
    """A scorer that never gave anything but 0."""
    names = dict.fromkeys(name for event in run.metrics.values() for name in event["metrics"]
                          if name.startswith("rollout/reward/"))
    weights = dict(zip(run.option("rm_type") or (), run.option("rm_weights") or (), strict=False))
    for name in names:
        scorer, values = name.removeprefix("rollout/reward/"), [value for _, value in run.series(name)]
        if not values or any(values):
            continue
        counts = weights.get(scorer, 1.0) != 0
        last = list(run.metrics.values())[-1]
        yield Finding(
            "warning" if counts else "note",
            f"the scorer {scorer!r} gave 0 to every answer of {len(values)} rollouts",
            "it says nothing about the answers, or never finds what it compares them with" if counts
            else "it has weight 0, so it changes nothing",
            f"compare an answer and its label in samples/ by hand; see --label-key and the options of {scorer!r}" + (
                "" if run.option("rollout_skip_special_tokens") else "; an answer's text has the token that ended it, "
                "unless --rollout-skip-special-tokens leaves it out"), run.where(last))


def scorer_failed(run: Record) -> Iterator[Finding]:
    """A scorer raised, hung, or gave no number."""
    if run.cause is Cause.SCORER:
        yield Finding("error", f"the run ended with: {run.said}",
                      "a failed score is not a reward of 0, so Miles does not train on it",
                      run.remedy("a scorer that is only slow needs a higher --rm-timeout"), run.where(run.end))


def starved(run: Record) -> Iterator[Finding]:
    """Filters leave too little."""
    if run.cause is Cause.FILTERS:
        yield Finding("error", f"the run ended with: {run.said}",
                      "no batch could be filled from what the filters kept",
                      run.remedy("then see --max-over-sampling-waves and the filter's options"), run.where(run.end))
        return
    drops, trained = Counter(), len(run.metrics) * int(run.option("rollout_batch_size") or 0)
    for event in run.of(Kind.DROP):
        drops[str(event.get("reason"))] += int(event.get("count") or 1)
    total = sum(drops.values())
    if trained and total > 4 * trained:
        reasons = ", ".join(f"{reason} {count}" for reason, count in drops.most_common(3))
        yield Finding("warning", f"filters dropped {total} groups ({reasons}) for {trained} that were trained on",
                      "most of what is sampled is thrown away, and the run ends when a batch cannot be filled",
                      "look at the reward and at how hard the prompts are; --over-sampling-batch-size hides the wait",
                      run.where(run.of(Kind.DROP)[-1]))


def truncated(run: Record) -> Iterator[Finding]:
    """Answers hit the length limit instead of ending."""
    share, length = run.latest("rollout/truncated_ratio"), run.option("rollout_max_response_len")
    if share is None or share < 0.5 or run.option("rollout_ignore_eos") or run.supervised:
        return
    rollout_id, last = list(run.metrics.items())[-1]
    yield Finding(
        "error" if share >= 0.95 else "warning",
        f"{share:.0%} of the latest answers were cut off at --rollout-max-response-len {length}",
        "an answer that is cut off is scored without its end, and the model never learns to stop",
        "raise --rollout-max-response-len; if answers ramble from the start, look at the template and the stop tokens "
        "(--rollout-stop-token-ids)", run.where(last), rollout_id)


def shrinking(run: Record) -> Iterator[Finding]:
    """Answers become very short."""
    ends = run.ends("rollout/response_len/mean")
    if ends is not None and ends[0] >= 20 and ends[1] < ends[0] / 4:
        rollout_id, last = list(run.metrics.items())[-1]
        yield Finding("warning", f"answers went from {ends[0]:.0f} tokens to {ends[1]:.0f}",
                      "a reward that short answers get most easily, or a loss that favours them, is being exploited",
                      "read samples/ of the last rollout; see --reduction, and whether the scorer rewards a bare guess",
                      run.where(last), rollout_id)


def stale(run: Record) -> Iterator[Finding]:
    """Training on tokens of old weights."""
    bound = run.option("max_lag")
    oldest = run.series("rollout/staleness/max") or run.series("rollout/weight_version/lag")
    if not oldest or bound is None or run.option("debug_rollout_only"):
        return
    rollout_id, worst = max(oldest, key=lambda pair: pair[1])
    if worst > int(bound):
        yield Finding("warning", f"tokens were {worst:.0f} versions old in training; --max-lag is {bound}",
                      "parts of an answer from before a call-back keep their age, and the policy has moved on since",
                      "bound it with --max-weight-staleness, or correct for it with the plugin tis",
                      run.where(run.metrics[rollout_id]), rollout_id)
    ends = run.ends("rollout/staleness/mean")
    if ends is not None and ends[1] > max(2 * ends[0], ends[0] + 1):
        last_id, last = list(run.metrics.items())[-1]
        yield Finding("warning", f"mean staleness grew from {ends[0]:.2f} to {ends[1]:.2f} versions",
                      "sampling falls behind: answers wait longer in the buffer, or take longer than a rollout",
                      "lower --max-lag or --async-max-concurrent-samples, or set --max-weight-staleness",
                      run.where(last), last_id)


def looping(samples: Sequence[dict]) -> float:
    """Share of the answers of LOOP tokens or more that end in a repetition; 0.0 where there are none."""
    ends = [sample["token_ids"][-LOOP:] for sample in samples if len(sample.get("token_ids") or ()) >= LOOP]
    return fmean(len(set(end)) <= LOOP_KINDS for end in ends) if ends else 0.0


def vocabulary(run: Record, samples: Iterable[dict]) -> int:
    """Size of the vocabulary, or a lower bound from the tokens seen."""
    known = run.architecture.get("vocab_size")
    seen = max((max(sample["token_ids"]) for sample in samples if sample.get("token_ids")), default=0) + 1
    return int(known) if known else seen


def _noise(run: Record, log_prob: float | None, samples: list[dict]) -> str | None:
    """Says so if the mean log-prob of a token is near that of an even draw."""
    even = -math.log(max(2, vocabulary(run, samples)))
    if log_prob is None or log_prob > LOST * even:
        return None
    return f"a token's mean log-prob is {log_prob:.2f}, and {even:.2f} is an even draw from all tokens"


def _log_prob(samples: list[dict]) -> float | None:
    values = [value for sample in samples for value in sample.get("log_probs") or () if value is not None]
    return fmean(values) if values else None


def _is_instruct(run: Record) -> bool:
    name = str(run.option("hf_checkpoint") or "").rstrip("/").rpartition("/")[2]
    return bool(re.search(r"(?i)instruct|chat|[-_.]it\b", name))


def _about_labels(run: Record, rollout_id: int) -> str:
    """What is odd about the labels, without their text."""
    key = run.option("label_key")
    labels = [sample.get("label") for sample in run.samples(rollout_id)]
    if not labels:
        return ""
    if not any(labels):
        return "; no sample has a label" + ("" if key else ", as --label-key is not given")
    if all(str(label).startswith(("[{", "{")) for label in labels):
        return f"; the labels, of key {key!r}, are messages and not answers"
    if len(set(labels)) == 1 and len({sample.get("prompt_uid") for sample in run.samples(rollout_id)}) > 1:
        return f"; all labels, of key {key!r}, are the same"
    return ""


def _first_line(run: Record) -> str:
    return "samples/rollout_000000.jsonl:1" if run.samples(0) else run.where(run.first)
