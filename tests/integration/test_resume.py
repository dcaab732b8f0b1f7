"""What a resume restores, and what it does not depend on: folder, host, number of starts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from miles_testing import kill_resume
from miles_testing.kill_resume import KillResume

from miles_core.record.events import read

pytestmark = pytest.mark.integration

ROLLOUTS = 6


@pytest.fixture
def course(run_file, tmp_path):
    """(*flags) -> runs of two optimizer steps per rollout with a decaying learning rate, saved after each rollout."""

    def make(*argv: str | Path, rollouts: int = ROLLOUTS) -> KillResume:
        common = [run_file(), "--rollout-shuffle", "--num-steps-per-rollout", "2", "--lr-decay-style", "linear",
                  "--save-interval", "1", "--threads", "1"]
        return KillResume(tmp_path, [*common, *argv], rollouts=rollouts)

    return make


def rows(run: Path) -> list[int]:
    """Rows of the dataset in the order in which they were trained on."""
    files = sorted((run / "samples").glob("rollout_*.jsonl"))
    return [json.loads(line)["row"] for file in files for line in file.read_text().splitlines()]


def differences(ours: Path, theirs: Path) -> list[str]:
    return kill_resume.problems(ours, theirs, rollouts=ROLLOUTS)


@pytest.mark.full
def test_a_resume_says_what_is_another_than_before(course, tiny, tmp_path):
    """In one note of the record: values, data, and the source of a plugin; nothing where all is as it was."""
    data = tmp_path / "train.jsonl"
    shutil.copy(tiny / "train.jsonl", data)
    whole = course("--prompt-data", data, rollouts=2)
    whole.finish("a", "--num-rollout", "1", "--lr-decay-iters", "4")
    data.write_text(data.read_text().replace("1", "2", 1))
    whole.finish("a", "--lr-decay-iters", "4", "--lr", "3e-4", "--rollout-seed", "7")
    assert any(event["event"] == "message" and "--prompt-data" in event["text"] and "resumed" in event["text"]
               for event in read(tmp_path / "a/run/events.jsonl"))

    def notes(run="a"):
        return [event["text"] for event in read(tmp_path / run / "run/events.jsonl")
                if event["event"] == "message" and "another plan" in event["text"]]

    [note] = notes()
    assert all(name in note for name in ("lr:", "0.0003", "rollout_seed:", "num_rollout: 1 -> 2"))
    with open(tmp_path / "digits.py", "a") as file:
        file.write("\n# another source\n")
    whole.finish("a", "--num-rollout", "3", "--lr-decay-iters", "4", "--lr", "3e-4", "--rollout-seed", "7")
    assert "plugin digits" in notes()[-1] and len(notes()) == 2 and "lr:" not in notes()[-1]
    whole.finish("a", "--num-rollout", "3", "--lr-decay-iters", "4", "--lr", "3e-4", "--rollout-seed", "7")
    assert len(notes()) == 2

    shutil.copytree(tmp_path / "a/run/checkpoints", tmp_path / "b/run/checkpoints")  # of another run, to this one
    whole.finish("b", "--num-rollout", "4", "--lr-decay-iters", "4", "--lr", "1e-4", "--rollout-seed", "7")
    [note] = notes("b")
    assert "lr: 0.0003 -> 0.0001" in note and "num_rollout: 3 -> 4" in note and "rollout_seed" not in note


def test_starts_and_folders_do_not_matter(course):
    whole = course()
    reference = whole.finish("reference")
    assert not differences(whole.finish("elsewhere"), reference)

    whole.finish("stopped", "--debug-exit-after-rollout", "3")
    stopped = whole.finish("stopped")
    assert not kill_resume.problems(stopped, reference, rollouts=ROLLOUTS, ends=2)
    starts = [event for event in read(stopped / "events.jsonl") if event["event"] == "run_start"]
    assert [event["resumed_from"] for event in starts] == [None, 3]


@pytest.mark.full
def test_a_run_that_is_made_longer_is_the_long_one(course):
    """The schedule's length has to be given, as it follows --num-rollout."""
    whole = course()
    reference = whole.finish("reference")
    steps = ("--lr-decay-iters", str(2 * ROLLOUTS))
    whole.finish("longer", "--num-rollout", "3", *steps)
    assert not kill_resume.problems(whole.finish("longer", *steps), reference, rollouts=ROLLOUTS, ends=2)

    other = whole.finish("other", "--rollout-seed", "7", "--num-rollout", "1", *steps)
    assert rows(other)[0] != rows(reference)[0]


@pytest.mark.full
@pytest.mark.parametrize("family, flags", [("qwen3_moe", ()), ("qwen3", ("--bf16",))], ids=["experts", "bfloat16"])
def test_other_models_and_precisions_go_on_where_they_were(run_file, tmp_path, family, flags):
    course = KillResume(tmp_path, [run_file(family), "--threads", "1", *flags], rollouts=4)
    reference = course.finish("reference")
    course.finish("stopped", "--debug-exit-after-rollout", "2")
    assert not kill_resume.problems(course.finish("stopped"), reference, rollouts=4, ends=2)


COUNTING = '''
"""A plugin with a memory."""
from miles_core import hookimpl


class Counting:
    """Counts the groups that it has seen."""

    def __init__(self):
        self.seen = 0

    @hookimpl("filter_group")
    def count(self, group):
        """Keep all."""
        self.seen += 1
        return group

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]
'''


@pytest.mark.full
def test_what_a_plugin_remembers_is_of_the_checkpoint_and_not_of_what_runs_meanwhile(course, tiny, tmp_path):
    """Sampling goes on during an evaluation; groups that a resumed run samples again must not have been counted."""
    (tmp_path / "counting.py").write_text(COUNTING)
    whole = course("--plugin", tmp_path / "counting.py", "--eval-prompt-data", "eval", tiny / "eval.jsonl",
                   "--eval-interval", "1", "--eval-max-response-len", "40", rollouts=4)
    saved = [operation for operation in whole.reference() if operation.path.endswith("iteration.txt")]
    assert not whole.killed_at(saved[-1])
    state = json.loads((whole.path / "reference/run/checkpoints/iter_0000002/miles.json").read_text())["state"]
    assert state["plugins"]["counting"]["rollout"]["state"] == {"seen": 8}
    assert (state["prompts"]["next"], state["prompts"]["again"]) == (8, [])


MEAN = '''
"""An estimator with a memory, which lives in the trainer."""
import os

from miles_core import hookimpl


class Mean:
    """Rewards less their mean over all rollouts so far; counts its process, so that ranks differ."""

    def __init__(self):
        self.mean, self.count, self.rank = 0.0, 0, None

    @hookimpl(name="running")
    def advantage(self, batch):
        """One number per sample."""
        from torch import distributed

        assert self.rank in (None, distributed.get_rank())
        self.rank = distributed.get_rank()
        for sample in batch.samples:
            self.count += 1
            self.mean += (sample.reward - self.mean) / self.count
        return [sample.reward - self.mean for sample in batch.samples]

    def state_dict(self):
        return {"mean": self.mean, "count": self.count, "rank": self.rank}

    def load_state_dict(self, state):
        self.mean, self.count, self.rank = state["mean"], state["count"], state["rank"]
'''


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_what_a_plugin_remembers_in_the_trainer_is_of_the_checkpoint_on_every_rank(course, tmp_path, ranks):
    (tmp_path / "mean.py").write_text(MEAN)
    flags = ("--plugin", tmp_path / "mean.py", "--advantage-estimator", "running", "--debug-determinism",
             "--actor-num-gpus-per-node", str(ranks), "--trainer-host", "thread" if ranks == 1 else "process")
    whole = course(*flags, rollouts=4)
    reference = whole.finish("reference")
    whole.finish("stopped", "--debug-exit-after-rollout", "2")
    assert not kill_resume.problems(whole.finish("stopped"), reference, rollouts=4, ends=2)
    saved = json.loads((reference / "checkpoints/iter_0000004/miles.json").read_text())["state"]["plugins"]["mean"]
    own = {role: one["state"]["rank"] for role, one in saved.items() if role.startswith("trainer")}
    assert own == ({"trainer": 0} if ranks == 1 else {"trainer/0": 0, "trainer/1": 1})
    if ranks > 1:
        fewer = whole.start("stopped", "--num-rollout", "5", "--actor-num-gpus-per-node", "1")
        assert fewer.code != 0 and "--drop-plugin-state mean" in fewer.err


SOURCE = '''
"""Prompts in an order of its own."""
from miles_core import hookimpl


class Own:
    """Counts what it gave."""

    @hookimpl(name="backwards")
    def prompt_source(self, config, tokenizer, read):
        """The rows from the last to the first."""
        from miles_core.stages.prompts import RowPrompts, rows_of

        class Backwards(RowPrompts):
            def state_dict(self):
                return {"given": self._next}

            def load_state_dict(self, state):
                self._next = state["given"]

            def __getitem__(self, uid):
                return super().__getitem__(len(self) - 1 - uid % len(self))

        return Backwards(rows_of(config), read(config.rollout.prompt_data), tokenizer)
'''


def test_a_resume_with_another_prompt_source_is_refused_or_begins_it_anew(course, tmp_path):
    (tmp_path / "own.py").write_text(SOURCE)
    whole = course("--plugin", tmp_path / "own.py", rollouts=1)
    whole.finish("a", "--prompt-source", "backwards")
    refused = whole.start("a", "--num-rollout", "2")
    assert refused.code == 2 and "'backwards'" in refused.err and "'rows'" in refused.err
    assert "--drop-plugin-state backwards" in refused.err and "KeyError" not in refused.err
    saved = whole.finish("a", "--num-rollout", "2", "--drop-plugin-state", "backwards") / "checkpoints"
    first, second = (json.loads((saved / f"iter_000000{i}/miles.json").read_text())["state"] for i in (1, 2))
    assert (first["prompt_source"], second["prompt_source"]) == ("backwards", "rows")
    assert second["prompts"]["next"] == first["prompts"]["given"], "the other source began with its first prompt"
    whole.finish("a", "--num-rollout", "3")


@pytest.mark.full
def test_an_interrupt_is_a_kill_with_a_word(course):
    """SIGINT and SIGTERM: exit code 130, the reason in the record, and the same resume."""
    whole = course()
    reference = whole.finish("reference")
    for name, number in (("SIGINT", signal.SIGINT), ("SIGTERM", signal.SIGTERM)):
        def interrupt(process, name=name, number=number):
            _wait_for_rollouts(whole.path / name / "run", 2)
            os.kill(process.pid, number)

        outcome = whole.start(name, while_running=interrupt)
        assert outcome.code == 130, outcome.err
        *_, last = read(whole.path / name / "run/events.jsonl")
        assert (last["event"], last["status"]) == ("run_end", "interrupted")
        run = whole.finish(name)
        assert kill_resume.checkpoint(run) == kill_resume.checkpoint(reference)
        assert not kill_resume.leftovers(run)


@pytest.mark.full
def test_a_trainer_in_a_process_of_its_own(course):
    """The same weights as in a thread; it dies with its parent; and its death is the run's own error."""
    whole = course(rollouts=2)
    reference, own = whole.finish("thread"), ("--trainer-host", "process")

    begin = time.monotonic()
    died = whole.path / "died/run"
    outcome = whole.start("died", *own, while_running=lambda process: _kill_trainer(died, process.pid))
    assert outcome.code == 1 and "the process 'trainer' died in" in outcome.err and "exit code -9" in outcome.err
    assert time.monotonic() - begin < 60
    events = list(read(died / "events.jsonl"))
    assert events[-1]["event"] == "run_end" and events[-1]["status"] == "failed" and "trainer" in events[-1]["error"]

    run = whole.finish("died", *own)
    assert kill_resume.checkpoint(run) == kill_resume.checkpoint(reference)
    assert kill_resume.samples(run) == kill_resume.samples(reference)
    assert not kill_resume.leftovers(run)


def test_a_killed_run_takes_its_trainer_process_along(course):
    """At once, whatever it is at: an orphan could publish a checkpoint beside the resumed run."""
    trainers: list[int] = []

    def kill(process) -> None:
        _wait_for_rollouts(whole.path / "orphan/run", 1)
        trainers.extend(_trainers(process.pid))
        os.kill(trainers[0], signal.SIGSTOP)  # so that it cannot notice by itself
        process.kill()

    whole = course(rollouts=2)
    outcome = whole.start("orphan", "--trainer-host", "process", while_running=kill)
    deadline = time.monotonic() + 5
    while (alive := _alive(trainers[0])) and time.monotonic() < deadline:
        time.sleep(0.01)
    if alive:
        os.kill(trainers[0], signal.SIGKILL)
    assert outcome.code == -9 and len(trainers) == 1 and not alive


def _wait_for_rollouts(run: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (run / "events.jsonl").exists():
            events = list(read(run / "events.jsonl"))
            if sum(event["event"] in ("metrics", "run_start") for event in events) > count:
                return
        time.sleep(0.005)
    raise AssertionError(f"{run} has not done {count} rollouts within a minute")


def _kill_trainer(run: Path, pid: int) -> None:
    _wait_for_rollouts(run, 1)
    [trainer] = _trainers(pid)
    os.kill(trainer, signal.SIGKILL)


def _trainers(pid: int) -> list[int]:
    """Spawned children of a process, without Python's resource tracker."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
