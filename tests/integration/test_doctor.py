"""miles doctor names what is wrong with a run, and nothing about a healthy one.

One real run of the demo's model is the healthy one. Faults that a laptop can have are real runs too; those that need a
GPU, a cluster or hours are that real record with the lines, or the numbers, that such a run leaves.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from miles_report.doctor.record import Record, newest
from miles_report.doctor.rules import Diagnosis, examine, rules
from miles_testing.forked import miles

from miles_core.errors import RunDirectoryError

ROOT = Path(__file__).parents[2]
DATA = ROOT / "examples" / "arithmetic"
ROLLOUTS = 16

RUN_FILE = f"""
plugins = ["grpo", "math"]

[checkpoint]
hf_checkpoint = "{DATA}/tiny-qwen3"

[rollout]
prompt_data = "{DATA}/train.jsonl"
input_key = "prompt"
label_key = "label"
apply_chat_template = true
num_rollout = {ROLLOUTS}
rollout_batch_size = 4
n_samples_per_prompt = 8
rollout_max_response_len = 8
rm_type = ["math"]

[perf]
bf16 = false
use_dynamic_batch_size = true
max_tokens_per_gpu = 4096

[algorithm]
use_kl_loss = true

[optimizer]
lr = 1e-4
"""


def start(folder: Path, *words: str, code: int = 0, **options) -> Path:
    """A real run in `folder`; its run directory."""
    (folder / "run.toml").write_text(RUN_FILE)
    outcome = miles(["run", "run.toml", "--no-live", "--run-dir", "run", *words], folder, **options)
    assert outcome.code == code, outcome
    return folder / "run"


@pytest.fixture(scope="module")
def healthy(tmp_path_factory) -> Path:
    """A real run that went well."""
    return start(tmp_path_factory.mktemp("healthy"))


@pytest.fixture
def patient(healthy, tmp_path) -> Patient:
    """A copy of it, to be made sick."""
    return Patient(shutil.copytree(healthy, tmp_path / "run"))


class Patient:
    """A copy of a real record, and what can be changed in it."""

    def __init__(self, path: Path):
        self.path = path

    def examine(self, now: float | None = None) -> Diagnosis:
        return examine(Record.load(self.path, now))

    def events(self, change: Callable[[list[dict]], list[dict] | None]) -> None:
        """Let `change` edit the events, in place or by returning others."""
        file = self.path / "events.jsonl"
        events = [json.loads(line) for line in file.read_text().splitlines()]
        events = change(events) or events
        file.write_text("".join(json.dumps(event) + "\n" for event in events))

    def metrics(self, **values: float | Callable[[int, float], float]) -> None:
        """Set metrics of every rollout, "/" written as "__": a number, or (rollout, old value) -> number."""
        def change(events: list[dict]) -> None:
            for event in events:
                if event["event"] == "metrics":
                    for name, value in values.items():
                        name = name.replace("__", "/")
                        old = event["metrics"].get(name)
                        event["metrics"][name] = value(event["rollout_id"], old) if callable(value) else value
        self.events(change)

    def ends(self, error: str | None, status: str = "failed", after: int = ROLLOUTS) -> None:
        """Let it end after so many rollouts, with an error."""
        def change(events: list[dict]) -> list[dict]:
            kept = [event for event in events[:-1] if (event["rollout_id"] or 0) < after]
            return [*kept, {**events[-1], "status": status, "error": error}]
        self.events(change)

    def adds(self, *events: dict, before_end: bool = True) -> None:
        """Add events, at the time of the last one."""
        def change(found: list[dict]) -> None:
            at = len(found) - before_end
            found[at:at] = [{"time": found[-1]["time"], "rollout_id": None, **event} for event in events]
        self.events(change)

    def logs(self, name: str, *lines: str) -> None:
        """Append to a log."""
        with open(self.path / "logs" / name, "a") as file:
            file.write("".join(f"{line}\n" for line in lines))

    def plan(self, **options: object) -> None:
        """Set options of the plan, "." written as "__"."""
        file = self.path / "plan.json"
        plan = json.loads(file.read_text())
        plan["options"] |= {name.replace("__", "."): value for name, value in options.items()}
        file.write_text(json.dumps(plan))

    def brings(self, plugin: str) -> None:
        """Add a plugin to the plan, with nothing switched on."""
        file = self.path / "plan.json"
        plan = json.loads(file.read_text())
        plan["plugins"].append({"name": plugin})
        file.write_text(json.dumps(plan))

    def samples(self, rollout_id: int, change: Callable[[dict], object]) -> None:
        """Let `change` edit every sample of a rollout."""
        file = self.path / "samples" / f"rollout_{rollout_id:06d}.jsonl"
        samples = [json.loads(line) for line in file.read_text().splitlines()]
        for sample in samples:
            change(sample)
        file.write_text("".join(json.dumps(sample) + "\n" for sample in samples))


def names(found: Diagnosis, *severities: str) -> list[str]:
    return [one.rule for one in found.findings if not severities or one.severity in severities]


# ----------------------------------------------------------------------------------------------------- a healthy run


def test_nothing_is_said_about_a_healthy_run(healthy):
    found = examine(Record.load(healthy))
    assert [(one.severity, one.rule, one.seen) for one in found.findings if one.rule != "imbalance"] == []
    assert (found.side, found.healthy, found.exit_code) == ("neither", True, 0)
    assert next(found.text()) == "neither: healthy"


def test_a_run_that_is_going_is_not_one_that_was_killed(patient):
    patient.events(lambda events: events[:-1])
    assert names(patient.examine(), "error") == ["killed"]
    with Record.load(patient.path).directory:
        found = patient.examine()
    assert found.healthy and found.state == f"running, {ROLLOUTS} of {ROLLOUTS} rollouts done"


def test_a_run_that_was_killed_while_it_loaded_is_not_healthy(healthy, tmp_path):
    """What such a one leaves: folders, its plan, and perhaps an empty record."""
    for name in ("plan.json", "plan.txt"):
        shutil.copy(healthy / name, tmp_path)
    (tmp_path / "samples").mkdir()
    for _ in range(2):
        assert names(examine(Record.load(tmp_path)), "error") == ["killed"]
        (tmp_path / "events.jsonl").touch()
    with Record.load(tmp_path).directory:
        assert examine(Record.load(tmp_path)).healthy


@pytest.mark.parametrize("lost", ["plan.json", "plan.txt", "events.jsonl", "samples", "logs"])
def test_a_rule_that_lacks_its_data_says_nothing(patient, lost):
    path = patient.path / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert patient.examine().healthy


# --------------------------------------------------------------------------------------- real runs that are really sick

NOISY = '''
"""A scorer that fails, or a loss, as the name of the plugin's options has it."""
import torch
from miles_core import hookimpl


class Noisy:
    """Faults to choose from."""

    @hookimpl("reward", name="raises")
    def raises(self, sample):
        raise ZeroDivisionError("a scorer's own mistake")

    @hookimpl("policy_loss", name="infinite")
    def infinite(self, inputs):
        return torch.where(inputs.sample == 1, float("inf"), inputs.log_probs), {}
'''

DROPS = '''
"""A filter that likes nothing."""
from miles_core import hookimpl
from miles_core.types import Drop


class Drops:
    """Drops every group."""

    @hookimpl("filter_group")
    def drop(self, group):
        return Drop("unliked")
'''

BROKEN = '''
"""A plugin with a mistake of its own."""
from miles_core import hookimpl


class Broken:
    """Fails with the metrics."""

    @hookimpl
    def metrics(self, rollout_id, values):
        raise KeyError("nobody foresaw this")
'''

UNTRAINED = '''
"""A hook around the step that forgets it."""
from miles_core import hookimpl


class Forgets:
    """Lets no step happen."""

    @hookimpl
    def train_step(self, proceed, access):
        return {}
'''

REAL = {
    "a wrong label key": (["--label-key", "prompt"], 0, "rollout", ["same-reward"], "are messages and not answers"),
    "random weights": (["--hf-checkpoint", "{tiny}/qwen3"], 0, "training", ["gibberish"], "an even draw"),
    "a scorer that raises": (["--plugin", "./noisy.py", "--rm-type", "raises"], 1, "rollout", ["scorer-failed"],
                             "a scorer's own mistake"),
    "an infinite loss": (["--plugin", "./noisy.py", "--policy-loss", "infinite"], 1, "training", ["non-finite"],
                         "is not finite"),
    "a filter that drops all": (["--plugin", "./drops.py"], 1, "rollout", ["starved"], "unliked"),
    "a step that is left out": (["--plugin", "./forgets.py"], 0, "training", ["untrained"], "no optimizer step"),
    "an error nobody foresaw": (["--plugin", "./broken.py", "--strict-trackers"], 1, "neither", ["failed"],
                                "nobody foresaw this"),
}


@pytest.mark.parametrize("fault", REAL)
def test_a_real_fault_is_named(fault, tmp_path, tiny):
    words, code, side, rules, seen = REAL[fault]
    for name, source in (("noisy", NOISY), ("drops", DROPS), ("broken", BROKEN), ("forgets", UNTRAINED)):
        (tmp_path / f"{name}.py").write_text(source)
    run = start(tmp_path, "--num-rollout", "2", *(word.format(tiny=tiny) for word in words), code=code)
    found = examine(Record.load(run))
    assert names(found, "error") == rules, "\n".join(found.text())
    assert (found.side, found.exit_code) == (side, 1)
    assert "told" not in names(found), "what ended the run is said once"
    worst = found.findings[0]
    assert seen in worst.seen
    name, _, number = worst.where.rpartition(":")
    assert len((run / name).read_text().splitlines()) >= int(number)


@pytest.mark.full
@pytest.mark.parametrize(("number", "words"), [
    (signal.SIGKILL, ["--save", "ckpt", "--load", "ckpt", "--save-interval", "1"]), (signal.SIGKILL, []),
    (signal.SIGTERM, []),
], ids=["killed", "killed without checkpoints", "interrupted"])
def test_a_run_that_was_ended_from_outside_and_how_it_goes_on(tmp_path, number, words):
    def end(process):
        deadline = time.monotonic() + 60
        events = tmp_path / "run" / "events.jsonl"
        wanted = '"checkpoint"' if words else '"metrics"'
        while not (events.is_file() and wanted in events.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(process.pid, number)

    code = 130 if number == signal.SIGTERM else -9
    run = start(tmp_path, "--num-rollout", "400", *words, code=code, while_running=end)
    found = examine(Record.load(run))
    finding = found.findings[0]
    if number == signal.SIGTERM:
        assert (finding.rule, finding.severity, found.side, found.exit_code) == ("interrupted", "note", "neither", 0)
    else:
        assert (finding.rule, finding.severity, found.side, found.exit_code) == ("killed", "error", "neither", 1)
        [symptom] = [rule.symptom for rule in rules() if rule.name == "killed"]
        assert next(found.text()) == f"neither side: {symptom}"
    assert ("the same command goes on after rollout" if words else "nothing was saved") in finding.fix


# --------------------------------------------------------------------------- a real record with the marks of a sickness


def gibberish(run):
    run.metrics(train__train_rollout_logprob_abs_diff_max=4.0, train__train_rollout_logprob_abs_diff=2.0)
    run.metrics(rollout__rollout_log_probs=-5.2)


def one_token(run):
    run.samples(0, lambda sample: sample.update(token_ids=[0] * 64, log_probs=[-0.01] * 64))


def template(run):
    run.plan(checkpoint__hf_checkpoint="/models/Qwen3-4B-Instruct", rollout__apply_chat_template=False)
    run.metrics(rollout__rollout_log_probs=-0.82, rollout__log_probs=-0.82, rollout__ref_log_probs=-0.82)


def same_reward(run):
    run.metrics(**{"rollout__zero_std__percentage": 1.0, "rollout__raw_reward": 1.0})


def fallen(run):
    run.metrics(rollout__raw_reward=lambda at, old: 0.6 if at < 8 else 0.05)


def experts(run):
    model = run.path.parent / "moe"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"num_experts": 128, "vocab_size": 151936}))
    run.plan(checkpoint__hf_checkpoint=str(model))
    fallen(run)
    run.metrics(train__train_rollout_logprob_abs_diff=lambda at, old: 0.012 * (1 + at))


def heartbeats(*times: float, **fields):
    def change(run):
        def put(events):
            at = events[-1]["time"]
            beat = {"event": "heartbeat", "rollout_id": None, "sampling": 4, "finished": 0, "dropped": 0,
                    "capacity": 12, "version": 1, "oldest_s": 1.0, "idle_s": 1.0, **fields}
            beats = [{**beat, "time": at + seconds} for seconds in times]
            return [*events[:-1], *beats] if fields else [*events[:-1], *beats, events[-1]]
        run.events(put)
    return change


def lost(run):
    run.adds(*[{"event": "engine_lost", "engine": "engine 1", "why": "its process ended with code -9"}] * 3)


def unstepped(run, **options):
    """Plugin forgets is around the step, and no rollout has one."""
    run.plan(**options)
    file = run.path / "plan.json"
    plan = json.loads(file.read_text())
    file.write_text(json.dumps(plan | {"order": {**plan["order"], "train_step": ["forgets"]}}))

    def forget(events):
        for event in events:
            if event["event"] == "metrics":
                event["metrics"] = {name: value for name, value in event["metrics"].items() if "train/" not in name}
    run.events(forget)


SCHEDULER = ("[2026-11-06 01:16:21 TP0] Scheduler hit an exception: Traceback (most recent call last):",
             '  File "/opt/sglang/srt/managers/scheduler.py", line 2857, in run_scheduler_process')
INDUCTOR = (
    '  File "/opt/torch/_inductor/remote_cache.py", line 206, in _get',
    '  File "/usr/lib/python3.12/json/decoder.py", line 355, in raw_decode',
    "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)")
NCCL = ("[rank1]:[E626 06:24:44.903881913 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=808, OpType=ALLREDUCE, NumelIn=9801523, NumelOut=9801523, Timeout(ms)=600000) ran "
        "for 600020 milliseconds before timing out.")
WAITED = ("weight_sync 'broadcast': the weight sync to version 4 did not finish within 600 s. Fix: look at the "
          "engine's log, or raise --weight-sync-timeout.")
SLOW = "scorer 'math' took longer than 60 s for train prompt 3. Fix: mend the scorer, or raise --rm-timeout."
CUDA = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB."

OUT = "trainer rank 0: out of memory in step 0 (got an allocation of 2.50 GiB). Fix: try, in this order: --lr."

SICK: dict[str, list[tuple[str, str, Callable[[Patient], object], str]]] = {
    "gibberish": [("error", "rollout", gibberish, "even draw"),
                  ("error", "rollout", one_token, "100% of the answers repeat")],
    "chat-template": [("warning", "rollout", template, "0.82 nats per token")],
    "same-reward": [("error", "rollout", same_reward, "all groups have one and the same reward"),
                    ("warning", "rollout", lambda run: run.metrics(
                        **{"rollout__zero_std__percentage": lambda at, old: 0.95}), "95% of the groups")],
    "silent-scorer": [("warning", "rollout", lambda run: run.metrics(rollout__reward__math=0.0), "'math' gave 0"),
                      ("note", "rollout", lambda run: (run.metrics(rollout__reward__math=0.0), run.plan(
                          rollout__rm_weights=[0.0])), "'math' gave 0")],
    "scorer-failed": [("error", "rollout", lambda run: run.ends(SLOW), "60 s")],
    "starved": [("warning", "rollout", lambda run: run.adds(
        {"event": "drop", "reason": "reward_std_zero", "count": 900, "rollout_id": 3}), "reward_std_zero 900")],
    "truncated": [("warning", "rollout", lambda run: run.metrics(rollout__truncated_ratio=0.7), "70%"),
                  ("error", "rollout", lambda run: run.metrics(rollout__truncated_ratio=1.0), "100%")],
    "shrinking": [("warning", "rollout", lambda run: run.metrics(
        rollout__response_len__mean=lambda at, old: 900 / (1 + at)), "tokens to")],
    "stale": [("warning", "rollout", lambda run: run.metrics(rollout__staleness__max=3.0), "3 versions old"),
              ("warning", "rollout", lambda run: (run.plan(rollout__max_lag=9), run.metrics(
                  rollout__staleness__mean=lambda at, old: 0.4 * at, rollout__staleness__max=8.0)), "grew from")],
    "disguised-oom": [("error", "rollout", lambda run: run.logs(
        "engine-0.log", *SCHEDULER, "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"),
        "illegal memory access")],
    "engine-oom": [("error", "rollout", lambda run: run.logs(
        "engine-0.log", *SCHEDULER, "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. "
        "Current value: mem_fraction_static=0.2"), "Not enough memory"),
                   ("error", "rollout", lambda run: run.logs("engine-0.log", *SCHEDULER, CUDA), "2.50 GiB")],
    "retractions": [("note", "rollout", lambda run: run.logs("engine-0.log", *[
        "[2026-11-06 01:16:21] KV cache pool is full. Retract requests. #retracted_reqs: 2, #new_tokens_gained: 812, "
        "#new_token_ratio: 0.4012 -> 0.9000"] * 25), "25 times")],
    "draft-drift": [("warning", "rollout", lambda run: run.metrics(
        rollout__spec_accept_rate=lambda at, old: 0.8 - 0.03 * at), "after 0.74 at best")],
    "engine-restarts": [("warning", "rollout", lost, "lost 3 times"),
                        ("error", "rollout", lambda run: (lost(run), run.ends(
                            "engine 1: it died after 3 restarts (got its process ended with code -9). Fix: look at "
                            "logs/engine-1.log, or raise --max-engine-restarts.")), "engine 1")],
    "failing-requests": [("warning", "rollout", lambda run: run.adds(*[
        {"event": "request_failed", "request": 7, "attempt": 1, "why": "connection reset"}] * 60), "60 requests")],
    "silent-worker": [("warning", "rollout", heartbeats(1, 31, 400, 430), "for 369 s"),
                      ("warning", "rollout", heartbeats(1, 31, idle_s=700.0), "for 700 s")],
    "not-loaded": [("error", "training", lambda run: (run.path / "logs" / "run.log").write_text("rollout 1/16\n"),
                    "Loaded checkpoint from")],
    "untrained": [("error", "training", unstepped, "16 rollouts had no optimizer step")],
    "first-kl": [("note", "training", lambda run: run.metrics(train__kl_loss=2e-5), "2e-05"),
                 ("warning", "training", lambda run: run.metrics(train__ppo_kl=-0.03), "0.03"),
                 ("warning", "training", lambda run: run.metrics(
                     rollout__ref_log_probs=lambda at, old: old - 0.8), "0.8"),
                 ("error", "training", lambda run: run.metrics(train__kl_loss=3.0), "train/kl_loss is 3")],
    "disagreement": [("warning", "both", lambda run: run.metrics(
        train__train_rollout_logprob_abs_diff=0.01), "0.01 per"),
                     ("error", "both", lambda run: run.metrics(
        train__train_rollout_logprob_abs_diff=0.9), "0.9 per")],
    "first-gradient": [("warning", "training", lambda run: run.metrics(train__grad_norm=40.0), "norm 40"),
                       ("error", "training", lambda run: run.metrics(train__grad_norm=4000.0), "norm 4e+03")],
    "explosion": [("error", "training", lambda run: run.metrics(
        train__grad_norm=lambda at, old: 1.0 if at < 11 else 1e4), "train/grad_norm was 1")],
    "non-finite": [("error", "training", lambda run: run.adds(
        {"event": "metrics", "metrics": {"train/loss": None}, "nonfinite": ["metrics.train/loss"], "rollout_id": 15}),
        "train/loss not finite, first at rollout 15"),
                   ("error", "rollout", lambda run: run.ends(
        "the engine's answer to request 12 has log-probs that are not finite."), "request 12")],
    "uncorrected": [("warning", "training", lambda run: run.metrics(rollout__off_policy_tokens=0.9), "90%"),
                    ("warning", "training", lambda run: (run.brings("tis"), run.metrics(
        rollout__off_policy_tokens=0.9)), "90%")],
    "experts-collapse": [("error", "training", experts, "128 experts")],
    "reward-falls": [("warning", "training", fallen, "0.05")],
    "collapse": [("error", "training", lambda run: run.metrics(
        rollout__rollout_log_probs=lambda at, old: old if at < 9 else -5.3), "near an even draw"),
                 ("error", "training", lambda run: run.samples(15, lambda sample: sample.update(token_ids=[9, 8] * 30)),
                  "repeat a few tokens"),
                 ("warning", "training", lambda run: run.metrics(
                     train__entropy_loss=lambda at, old: 1.0 if at < 8 else 0.01), "entropy fell")],
    "trainer-oom": [("error", "both", lambda run: (run.plan(perf__colocate=True), run.ends(OUT, after=1)), "2.50 GiB"),
                    ("error", "training", lambda run: run.ends(OUT), "2.50 GiB")],
    "hang": [("error", "both", lambda run: run.ends(WAITED), "version 4"),
             ("error", "training", lambda run: run.logs("trainer-rank-1.log", NCCL), "ran for 600020 milliseconds"),
             ("error", "rollout", lambda run: run.logs(
                 "engine-0.log", "[2026-11-06 01:16:21] Scheduler watchdog timeout (self.watchdog_timeout=300, "
                 "self.soft=False)"), "watchdog_timeout=300")],
    "dead-process": [("error", "training", lambda run: run.ends(
        "the process 'trainer rank 1' died in step() (got exit code -9). Fix: look at logs/trainer-rank-1.log."), "-9"),
                     ("error", "both", lambda run: (run.ends("trainer: it is gone"), run.logs(
                         "run.log", "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this "
                         "task.")), "ActorDiedError"),
                     ("warning", "training", lambda run: run.adds(*[
                         {"event": "restart", "count": 1, "most": 3, "culprit": "trainer rank 1 died", "error": "-9",
                          "resumes": "ckpt"}] * 2), "started 3 times")],
    "inductor-cache": [("error", "training", lambda run: run.logs("trainer-rank-0.log", *INDUCTOR), "Expecting value")],
    "imbalance": [("note", "rollout", lambda run: run.metrics(perf__rollout_time=30.0), "rollout")],
    "killed": [("error", "neither", lambda run: run.events(lambda events: events[:-1]), "no process writes to it")],
    "interrupted": [("note", "neither", lambda run: run.ends(None, "interrupted", 4), "after 4 rollouts")],
    "disk": [("error", "neither", lambda run: run.ends(
        "run/events.jsonl: the disk is full (got No space left on device). Fix: free some space."), "disk is full"),
             ("error", "neither", lambda run: run.logs(
                 "engine-0.log", "OSError: [Errno 28] No space left on device: '/tmp/x'"), "Errno 28")],
    "damaged": [("warning", "neither", lambda run: (run.path / "events.jsonl").write_text(
        "{}\n" + (run.path / "events.jsonl").read_text()), "line 1 is damaged")],
    "told": [("note", "neither", lambda run: run.adds(
        {"event": "message", "level": "warning", "text": "a plugin saw a ghost"}), "saw a ghost")],
    "failed": [("error", "neither", lambda run: run.ends("KeyError: 'x'. Fix: mend it."), "KeyError")],
}  # fmt: skip


def test_the_answer_cannot_steer_the_terminal(patient):
    patient.ends("scorer 'mine' failed (got ValueError: \x1b]0;title\x07\x1b[2J\u202e\r). Fix: mend it.")
    assert all(char.isprintable() for line in patient.examine().text() for char in line)


def test_sides_of_one_process_that_sample_ahead_do_not_take_turns(patient):
    patient.metrics(perf__actor_train_time=30.0)
    patient.plan(rollout__max_lag=2)
    (found,) = [one for one in patient.examine().findings if one.rule == "imbalance"]
    assert "train" in found.seen and "turns" not in found.why and "idles" not in found.why


def test_every_rule_has_a_sickness():
    assert set(SICK) == {rule.name for rule in rules()}


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in SICK.items() for case in range(len(cases))])
def test_a_sickness_is_named_with_its_side_and_a_remedy(patient, name, case):
    severity, side, infect, seen = SICK[name][case]
    infect(patient)
    found = patient.examine()
    mine = [one for one in found.findings if one.rule == name and one.severity == severity and seen in one.seen]
    assert mine, "\n".join(found.text())
    assert mine[0].side == side
    assert mine[0].why and mine[0].fix
    assert found.exit_code == ("error" in [one.severity for one in found.findings])
    file, _, number = mine[0].where.partition(":")
    assert len((patient.path / file).read_text().splitlines()) >= int(number or 1)


@pytest.mark.parametrize("left_out", [False, True])
def test_a_scorer_of_nothing_but_0_may_have_read_special_tokens(patient, left_out):
    patient.metrics(rollout__reward__math=0.0)
    patient.plan(rollout__rollout_skip_special_tokens=left_out)
    [finding] = [one for one in patient.examine().findings if one.rule == "silent-scorer"]
    assert ("--rollout-skip-special-tokens" in finding.fix) == (not left_out)


@pytest.mark.parametrize(("options", "seen"), [
    ({}, True),
    ({"megatron__moe_enable_routing_replay": True}, False),
    ({"megatron__moe_enable_routing_replay": True, "any__use_routing_replay": True}, True),
    ({"megatron__moe_enable_routing_replay": True, "any__use_routing_replay": True,
      "any__use_rollout_routing_replay": True}, False),
], ids=["free", "the engine's", "the trainer's own", "both said"])
def test_replayed_routing_of_the_engine_is_no_cause_of_a_collapse(patient, options, seen):
    experts(patient)
    patient.plan(**options)
    assert ("experts-collapse" in [one.rule for one in patient.examine().findings]) == seen


def test_steps_of_a_critic_alone_are_meant(patient):
    unstepped(patient, ppo__num_critic_only_steps=ROLLOUTS)
    assert "untrained" not in names(patient.examine())


def test_what_follows_from_a_sickness_does_not_hide_it(patient):
    """The side is that of the worst findings, and a consequence is no worse than its cause."""
    gibberish(patient)
    patient.metrics(rollout__truncated_ratio=1.0)
    assert names(patient.examine(), "error") == ["gibberish"]
    severities = [one.severity for one in patient.examine().findings]
    assert severities == sorted(severities, key=("error", "warning", "note").index)


@pytest.mark.parametrize("harmless", [
    lambda run: run.metrics(rollout__spec_accept_rate=0.6),
    lambda run: run.metrics(rollout__truncated_ratio=0.2),
    lambda run: run.logs("engine-0.log", "[2026-11-06 01:16:21] The server is fired up and ready to roll!",
                         "server_args=ServerArgs(watchdog_timeout=300, soft_watchdog_timeout=None)"),
    lambda run: run.metrics(rollout__staleness__max=0.0, rollout__staleness__mean=0.0),
    lambda run: (run.plan(algorithm__use_rollout_logprobs=True), run.metrics(rollout__off_policy_tokens=0.9)),
    lambda run: (run.plan(tis__use_tis=True), run.metrics(rollout__off_policy_tokens=0.9)),
    lambda run: (run.plan(rollout__max_lag=2), run.metrics(rollout__staleness__max=2.0, rollout__staleness__mean=0.7)),
    heartbeats(1, 31, 61),
    lambda run: run.logs("trainer-rank-0.log", "json.decoder.JSONDecodeError: a plugin's own"),
    lambda run: (run.plan(algorithm__loss_type="sft_loss"), run.metrics(rollout__zero_std__percentage=1.0)),
], ids=range(10))  # fmt: skip
def test_what_resembles_a_sickness_and_is_none(patient, harmless):
    harmless(patient)
    assert patient.examine().healthy, "\n".join(patient.examine().text())


def test_a_worker_that_hangs_in_a_run_that_goes_on(patient):
    heartbeats(1, 31)(patient)
    patient.events(lambda events: events[:-1])
    last = json.loads((patient.path / "events.jsonl").read_text().splitlines()[-1])["time"]
    with Record.load(patient.path).directory:
        assert patient.examine(last + 20).healthy
        found = patient.examine(last + 200)
    assert names(found, "error") == ["silent-worker"] and str(os.getpid()) in found.findings[0].fix


def test_whatever_a_kill_left_of_the_record_is_read(patient):
    """Cut off at any byte, events.jsonl is that of a killed run, or of none that started."""
    whole = (patient.path / "events.jsonl").read_bytes()
    for size in range(0, len(whole), 997):
        (patient.path / "events.jsonl").write_bytes(whole[:size])
        found = patient.examine()
        assert names(found, "error") == (["killed"] if b'"run_start"' in whole[:size].rpartition(b"\n")[0] else [])


def test_superseded_rollouts_are_forgotten(patient):
    """What a start before a resume wrote about rollouts that were done again is not the run's history."""
    def resumed(events):
        bad = {"event": "metrics", "time": 1.0, "rollout_id": 5, "metrics": {}, "nonfinite": ["metrics.train/loss"]}
        start = next(event for event in events if event["event"] == "run_start")
        return [{**start, "time": 0.5}, bad, *events]
    patient.events(resumed)
    assert patient.examine().healthy


# ------------------------------------------------------------------------------------------------------- the command


def test_the_command_and_its_exit_codes(healthy, patient):
    good = miles(["doctor", healthy], patient.path)
    assert good.code == 0 and good.out.startswith("neither: healthy\n"), good
    patient.metrics(rollout__truncated_ratio=0.7)
    assert miles(["doctor", patient.path], patient.path).code == 0  # a warning
    patient.ends("KeyError: 'x'. Fix: mend it.")
    sick = miles(["doctor", patient.path, "--json"], patient.path)
    said = json.loads(sick.out)
    assert (sick.code, said["exit_code"], said["healthy"]) == (1, 1, False)
    assert [one["rule"] for one in said["findings"]][0] == "failed"
    assert miles(["doctor", patient.path / "logs"], patient.path).code == 2


def test_without_a_run_it_takes_the_newest(healthy, tmp_path):
    with pytest.raises(RunDirectoryError, match="no run in this folder"):
        newest(tmp_path / "runs")
    for age, name in ((100, "old"), (1, "new"), (50, "older")):
        copy = shutil.copytree(healthy, tmp_path / "runs" / name)
        os.utime(copy / "events.jsonl", (time.time() - age,) * 2)
    assert newest(tmp_path / "runs").name == "new"
    assert "new: completed" in miles(["doctor"], tmp_path).out


def test_it_imports_no_torch_and_answers_at_once(healthy):
    import subprocess
    import sys

    code = ("import sys; from miles_core.cli import command_line\ntry: command_line()\nexcept SystemExit: pass\n"
            "assert not {'torch', 'transformers', 'megatron', 'ray'} & set(sys.modules)")
    begin = time.monotonic()
    command = [sys.executable, "-c", code, "doctor", str(healthy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("neither: healthy")
    assert time.monotonic() - begin < 20  # 0.3 s on an idle machine


def test_a_long_log_is_searched_at_both_ends_with_true_line_numbers(patient, monkeypatch):
    from miles_report.doctor import record

    monkeypatch.setattr(record, "EACH", 2000)
    filler = ["[2026-11-06 01:16:21] Decode batch, #running-req: 18, token usage: 0.13"] * 500
    patient.logs("engine-0.log", *filler, "CUDA error: an illegal memory access was encountered", "the end")
    finding = patient.examine().findings[0]
    assert (finding.rule, finding.where) == ("disguised-oom", "logs/engine-0.log:501")


# --------------------------------------------------------------------------------------------------------- the page


def section() -> str:
    """The page's part about the doctor."""
    return (ROOT / "docs" / "debugging.md").read_text(encoding="utf-8").partition("## Ask the doctor")[2].partition(
        "\n## ")[0]


def test_the_page_shows_what_the_command_says(tmp_path):
    """Wrapped for the page; on which line of the record something stands is another matter."""
    start(tmp_path, "--label-key", "prompt", "--num-rollout", "3", "--run-dir", "runs/wrong")
    said = miles(["doctor", "runs/wrong"], tmp_path).out
    shown = "\n".join(line for line in section().splitlines() if line.startswith("    "))

    def words(text):
        return re.sub(r"jsonl:\d+", "jsonl:N", text).split()

    assert words(shown) == words(said)


def test_the_page_has_a_row_for_every_rule():
    table = [f"| `{rule.name}` | {rule.side} | {rule.symptom} |" for rule in rules()]
    assert [line for line in section().splitlines() if line.startswith("| `")] == table
