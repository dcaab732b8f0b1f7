"""What stays in a folder of checkpoints: by the policy, in a run and after a kill."""

import json
import os

import pytest
from miles_retention import folder
from miles_retention.plugin import Retention, RetentionOptions
from miles_retention.policy import Policy, Rules, bound, checkpoint_bytes
from miles_testing import kill_resume
from miles_testing.runs import toy_run
from miles_testing.tiny import run_file, tiny_checkpoint

from miles_core.config.load import load
from miles_core.errors import ConfigError
from miles_core.plugins.plan import prepare
from miles_core.record.events import read
from miles_core.record.publish import clear
from miles_core.types import TRACKER

THERE = [2, 4, 6, 8, 10]


def policy(tmp_path, measured=(), **options):
    """A policy that was told of a metric after so many rollouts: {10: 0.5}."""
    made = Policy(Rules(**options), tmp_path)
    for done, value in dict(measured).items():
        made.measured(done, {"eval/sums": value})
    return made


@pytest.mark.parametrize(("options", "kept"), [
    ({}, THERE), ({"keep_last": 1}, [10]), ({"keep_last": 3}, [6, 8, 10]), ({"keep_last": 9}, THERE),
    ({"save_retain_interval": 4}, [4, 8, 10]), ({"save_retain_interval": 4, "keep_last": 2}, [4, 8, 10]),
    ({"keep_best": 2, "keep_metric": "eval/sums"}, [4, 8, 10]),
    ({"keep_best": 1, "keep_metric": "eval/sums", "keep_mode": "min"}, [2, 10]),
])  # fmt: skip
def test_what_is_kept(tmp_path, options, kept):
    measured = {2: 0.1, 4: 0.9, 6: 0.5, 8: 0.9, 10: float("nan")}
    assert policy(tmp_path, measured, **options).kept(THERE) == set(kept)


def test_the_metric_of_a_rollout_is_that_of_the_checkpoint_it_was_sampled_from(tmp_path):
    """The step of rollout 3 has ruined what scored so well: it is not the checkpoint after it that was good."""
    made = Policy(Rules(keep_best=1, keep_metric="rollout/raw_reward"), tmp_path)
    for rollout_id in range(10):
        made.measured(rollout_id, {"rollout/raw_reward": [0.5, 0.6, 0.7, 0.9][rollout_id] if rollout_id < 4 else 0.0})
    assert made.kept(THERE) == {2, 10}


def test_nothing_is_removed_while_the_metric_of_the_best_is_unknown(tmp_path, caplog):
    made = policy(tmp_path, {4: 0.9}, keep_best=1, keep_metric="eval/sumz")
    assert made.kept([2]) == {2} and not caplog.text
    assert made.kept(THERE) == set(THERE) and "eval/sumz is not measured" in caplog.text


def test_what_earlier_starts_measured_is_known(tmp_path):
    lines = [{"event": "run_start", "resumed_from": None},
             {"event": "eval", "rollout_id": 4, "metrics": {"eval/sums": 0.9}}]
    text = "".join(json.dumps({"time": 1.0, "rollout_id": None, **line}) + "\n" for line in lines)
    (tmp_path / "events.jsonl").write_text(text)
    assert policy(tmp_path, keep_best=1, keep_metric="eval/sums").kept(THERE) == {4, 10}


def checkpoints(path, numbers, latest):
    for number in numbers:
        (path / f"iter_{number:07d}").mkdir(parents=True)
        (path / f"iter_{number:07d}" / "common.pt").write_text("x")
    (path / TRACKER).write_text(f"{latest}\n")


def test_what_lies_beyond_the_newest_is_nobodys_to_remove(tmp_path):
    """Somebody went back to 6 by the file that names the newest."""
    checkpoints(tmp_path / "ckpt", THERE, 6)
    config = load(None, ["--save", str(tmp_path / "ckpt")]).config
    plugin = Retention(RetentionOptions(keep_last=1), config)
    plugin.begin({}, "a1b2", None, tmp_path)
    plugin.metrics(6, {})
    plugin.finish("completed")
    assert folder.saved(tmp_path / "ckpt") == [6, 8, 10]


def test_a_kill_in_the_middle_leaves_no_half_checkpoint(tmp_path, monkeypatch):
    checkpoints(tmp_path, THERE, 10)

    def killed(path, **_):
        raise KeyboardInterrupt(path)

    monkeypatch.setattr(folder.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        folder.remove(tmp_path, [2, 4])
    monkeypatch.undo()
    assert folder.saved(tmp_path) == THERE[1:]
    clear(tmp_path)  # as the next save does
    assert sorted(os.listdir(tmp_path)) == [*(f"iter_{number:07d}" for number in THERE[1:]), TRACKER]


def test_settings_that_cannot_hold_are_refused():
    for flags in (["--retention.keep-best", "2"], ["--retention.keep-metric", "eval/x"]):
        with pytest.raises(ConfigError, match="keep_best and keep_metric"):
            Retention(RetentionOptions(**load(None, ["--plugin", "retention", *flags]).config.options["retention"]),
                      load(None, []).config)
    config = load(None, ["--save", "x", "--save-interval", "4", "--num-rollout", "10"]).config
    with pytest.raises(ConfigError, match="write 8"):
        Retention(RetentionOptions(save_retain_interval=6), config).check(config, print)
    with pytest.raises(ConfigError, match="eval-interval"):
        Retention(RetentionOptions(keep_best=1, keep_metric="eval/sums"), config).check(config, print)


@pytest.mark.parametrize(("options", "words"), [
    ({}, "kept: all; at most 3 at a time in x"), ({"keep_last": 1}, "the last 1; at most 2 at a time"),
    ({"keep_last": 9}, "at most 3 at a time"),
    ({"save_retain_interval": 4, "keep_last": 1}, "the last 1 and one in 4 rollouts; at most 3 at a time"),
])  # fmt: skip
def test_the_plan_says_how_many_there_are(options, words):
    config = load(None, ["--save", "x", "--save-interval", "4", "--num-rollout", "10"]).config
    assert words in bound(Rules(**options), config)


def test_the_plan_counts_checkpoints_that_a_file_asks_for():
    flags = ["--save", "x", "--save-interval", "8", "--num-rollout", "9", "--save-trigger-sentinel", "x/save"]
    config = load(None, flags).config
    assert "at most 4 at a time" in bound(Rules(keep_last=3), config)
    assert "at most 9 at a time" in bound(Rules(), config)


@pytest.mark.parametrize(("every", "said"), [("6", True), ("2", False)])
def test_the_plan_says_which_checkpoints_have_a_value_of_the_metric(every, said):
    """Of those after 4, 8, ... rollouts, every third is evaluated."""
    config = load(None, ["--save", "x", "--save-interval", "4", "--num-rollout", "10", "--eval-interval", every]).config
    text = bound(Rules(keep_best=1, keep_metric="eval/sums"), config)
    assert ("(measured of one in 3 and of the last)" in text) is said


@pytest.mark.parametrize(("flags", "times"), [
    (("--advantage-estimator", "ppo", "--critic-load", ""), 2), (("--advantage-estimator", "ppo"), 2),
    (("--trainer", "fsdp"), 0.75), (("--trainer", "fsdp", "--no-save-optim"), 0.25),
    (("--no-save-optim",), 0.25), (("--plugin", "lora"), None),
])  # fmt: skip
def test_the_plan_counts_whatever_a_checkpoint_has(tmp_path, flags, times):
    """Of float32: weights, and of AdamW three numbers, the weights once more among them with Megatron alone; a critic's
    as many. Adapters are smaller than anybody knows before they are there."""
    folder = tiny_checkpoint()
    plans = [prepare(run_file(tmp_path / "run.toml", [], {}, {}, checkpoint=folder), more)
             for more in ([], [flag or str(folder) for flag in flags])]
    plain, size = (checkpoint_bytes(plan.config, plan.selected) for plan in plans)
    assert size == (times and times * plain)


@pytest.mark.integration
def test_a_run_keeps_what_it_should_and_its_plan_says_how_much_that_is(tmp_path):
    run = toy_run(steps=5, flags=["--save", str(tmp_path / "ckpt"), "--save-interval", "1",
                                  "--save-retain-interval", "2", "--retention.keep-last", "1"])
    assert folder.saved(tmp_path / "ckpt") == [2, 4, 5]
    assert "one in 2 rollouts; at most 4 at a time" in (run.folder / "plan.txt").read_text()
    size = sum(file.stat().st_size for file in (tmp_path / "ckpt/iter_0000005").glob("*.distcp"))
    estimate = checkpoint_bytes(load(run.folder.parent / "run.toml", []).config, ())
    assert 0 < size - estimate < 200_000, "beside the numbers there is a kilobyte for each tensor"


@pytest.mark.integration
def test_a_file_asks_for_a_checkpoint_once(tmp_path):
    sentinel = tmp_path / "save-now"
    sentinel.write_text("")
    toy_run(steps=4, flags=["--save", str(tmp_path / "ckpt"), "--save-trigger-sentinel", str(sentinel)])
    assert folder.saved(tmp_path / "ckpt") == [1, 4] and not sentinel.exists()


SIGNALS = """
import os
import signal
from miles_core import hookimpl


class Signals:
    @hookimpl
    def metrics(self, rollout_id):
        if rollout_id == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
"""


@pytest.mark.integration
def test_a_signal_asks_for_a_checkpoint(tmp_path):
    (tmp_path / "signals.py").write_text(SIGNALS)
    toy_run(["retention", tmp_path / "signals.py"], steps=4, flags=[
        "--save", str(tmp_path / "ckpt"), "--save-trigger-sentinel", str(tmp_path / "save-now")])
    assert folder.saved(tmp_path / "ckpt") == [3, 4], "after the rollout that is trained on when the signal comes"


def hashes(run):
    """Totals of all weights after each rollout."""
    return [event["weights"] for event in read(run / "events.jsonl") if event["event"] == "hashes"]


@pytest.mark.full
@pytest.mark.integration
def test_a_resumed_run_keeps_the_same_and_ends_with_the_same_bits(tmp_path):
    toy = run_file(tmp_path / "run.toml", ["retention"], {"optimizer": {"lr": 1e-3}}, {})
    flags = [toy, "--threads", "1", "--save-interval", "1", "--retention.keep-last", "1", "--debug-determinism"]
    course = kill_resume.KillResume(tmp_path, flags, rollouts=4)
    whole = course.finish("whole")
    part = course.finish("part", "--num-rollout", "2", "--lr-decay-iters", "4")
    assert folder.saved(part / "checkpoints") == [2]
    course.finish("part")
    assert folder.saved(part / "checkpoints") == [4] == folder.saved(whole / "checkpoints")
    assert [hashes(part)] == [hashes(whole)]
