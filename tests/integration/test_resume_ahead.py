"""Kill it anywhere, resume, in each mode: synchronous, one step off, fully asynchronous.

At max_lag 0 the resumed run ends as the one that was not killed, to the bit. Ahead of training it depends on timing
which weights a prompt meets, so what has to hold is said by `kill_resume.problems_ahead`: no prompt lost or trained on
twice, the staleness bound kept, and what a checkpoint holds finished trained on to the bit as it is there.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from pathlib import Path

import pytest
from miles_testing import kill_resume
from miles_testing.kill_resume import KillResume

from miles_core.record.replay import load_batch

pytestmark = pytest.mark.integration

ROLLOUTS = 6
MODES = {
    "sync": ["--max-lag", "0"],
    "one-off": ["--max-lag", "1"],
    "async": ["--max-lag", "3", "--batch-order", "window", "--over-sampling-batch-size", "6",
              "--async-unused-samples-handler", "retry", "--eval-interval", "2"],
}
LAGS = {"sync": 0, "one-off": 1, "async": 3}

MEMORY = '''
"""A plugin with a memory, and one that ends the run between two optimizer steps."""
import os
import signal
from collections import Counter
from pathlib import Path
from miles_core import hookimpl


class Memory:
    """Counts how often it has seen a prompt's group."""

    def __init__(self):
        self.seen = Counter()

    @hookimpl("filter_group")
    def remember(self, group):
        """Keep all."""
        self.seen[str(group.prompt.uid)] += 1
        return group

    def state_dict(self):
        return dict(sorted(self.seen.items()))

    def load_state_dict(self, state):
        self.seen = Counter(state)

    @hookimpl("train_step")
    def between(self, proceed, access):
        """SIGKILL before the second step of rollout 3, where a file asks for it."""
        if access.index == 1 and access.batch.rollout_id == 3 and Path("kill-me").exists():
            Path("kill-me").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return proceed()
'''


@pytest.fixture
def course(run_file, tiny, tmp_path, picky):
    """(mode, *flags, most=None) -> runs of two optimizer steps per rollout, saved after each, some groups dropped.

    `most` is the largest max_lag of starts that have several.
    """
    (tmp_path / "memory.py").write_text(MEMORY)

    def make(mode: str, *argv: str | Path, most: int | None = None, rollouts: int = ROLLOUTS) -> KillResume:
        common = [run_file(), "--rollout-shuffle", "--num-steps-per-rollout", "2", "--save-interval", "1",
                  "--threads", "1", "--plugin", tmp_path / "memory.py", "--plugin", picky,
                  "--eval-prompt-data", "eval", tiny / "eval.jsonl",
                  "--save-debug-rollout-data", "run/debug/{rollout_id}.safetensors"]
        surplus = mode == "async" or most is not None

        def judge(run: Path) -> list[str]:
            lag = LAGS[mode] if most is None else most
            return [*kill_resume.problems_ahead(run, rollouts=rollouts, max_lag=lag, surplus=surplus),
                    *remembered(run, surplus)]

        return KillResume(tmp_path, [*common, *MODES[mode], *argv], rollouts=rollouts,
                      judge=None if mode == "sync" and most is None else judge)

    return make


def remembered(run: Path, surplus: bool) -> list[str]:
    """Whether the plugin's state in every checkpoint is of what the checkpoint holds and of what was done before."""
    wrong, done = [], set()
    for number in range(len(list(run.glob("checkpoints/iter_*")))):
        done |= {group.prompt.uid for group in load_batch(str(run / "debug/{rollout_id}.safetensors"), number).groups}
        state = json.loads((run / f"checkpoints/iter_{number + 1:07d}/miles.json").read_text())["state"]
        seen = {int(uid): times for uid, times in state["plugins"]["memory"]["rollout"]["state"].items()}
        slots = state.get("flow", {}).get("slots", ())
        ended = {slot["prompt"]["uid"] for slot in slots if slot["finished"] or slot["drop"]}
        begun = {slot["prompt"]["uid"] for slot in slots} - ended
        if missing := (done | ended) - seen.keys():
            wrong.append(f"checkpoint {number + 1} does not remember prompts {sorted(missing)}")
        if not surplus and (set(seen.values()) != {1} or begun & seen.keys()):
            wrong.append(f"checkpoint {number + 1} remembers what was sampled after it: {seen}, begun {begun}")
    return wrong


def under_way(run: Path) -> Counter:
    """What the checkpoints of a run hold, by kind."""
    found: Counter = Counter()
    for path in run.glob("checkpoints/iter_*/miles.json"):
        for slot in json.loads(path.read_text())["state"].get("flow", {}).get("slots", ()):
            found["dropped" if slot["drop"] else "finished" if slot["finished"] else "begun"] += 1
    return found


def between_steps(course: KillResume) -> list[str]:
    """Kill a run before the second of a rollout's two optimizer steps, and resume it."""
    folder = course.path / "between"
    folder.mkdir()
    (folder / "kill-me").touch()
    outcome = course.start("between")
    assert outcome.code == -9 and not (folder / "kill-me").exists(), outcome
    return course.resumed("between")


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
def test_a_sample_of_kills(course, mode):
    run = course(mode)
    recorded = run.reference()
    kept = under_way(run.path / "reference/run")
    draw, found = random.Random(mode), {"between steps": between_steps(run)}
    if mode == "sync":  # which has a sample of its own in test_resume_kills.py
        assert not kept
    else:
        assert kept["finished"] or kept["begun"], "nothing was under way, so this shows little"
        assert not run.judge(run.path / "reference/run")
        points = [draw.choice([o for o in recorded if "flow.safetensors" in o.path]), draw.choice(recorded)]
        found |= {str(point): run.killed_at(point) for point in points}
        found["twice"] = run.killed_after(*(run.seconds * draw.uniform(0.3, 0.8) for _ in range(2)), name="twice")
    assert not {where: wrong for where, wrong in found.items() if wrong}


@pytest.mark.full
def test_what_is_sampled_again_from_the_same_weights_is_what_it_was(course):
    """With a learning rate of 0 all weights are equal, so an answer is a function of the prompt: timing is nowhere."""
    run = course("async", "--lr", "0")
    run.reference()

    def answers(name: str) -> dict[int, list]:
        folder = run.path / name / "run"
        return {group.prompt.uid: [(s.tokens.tolist(), s.columns["rollout_log_probs"].tobytes()) for s in group.samples]
                for rollout in range(ROLLOUTS)
                for group in load_batch(str(folder / "debug/{rollout_id}.safetensors"), rollout).groups}

    draw = random.Random(2)
    for attempt in range(10):  # it may have ended before it is killed
        moment = run.seconds * draw.uniform(0.5, 0.8)
        name = f"killed-{attempt}"
        if run.start(name, while_running=lambda process, moment=moment: (process.join(moment), process.kill())).code:
            break
    assert not run.judge(run.finish(name))
    ours, theirs = answers(name), answers("reference")
    both = ours.keys() & theirs.keys()
    assert len(both) > 16 and all(ours[uid] == theirs[uid] for uid in both)


@pytest.mark.full
def test_groups_under_way_of_other_data_or_in_a_broken_file_are_refused(course, tiny):
    run = course("one-off", rollouts=3)
    folder = run.finish("run") / "checkpoints"
    whole = (folder / "iter_0000002/flow.safetensors").read_bytes()
    (folder / "latest_checkpointed_iteration.txt").write_text("2\n")
    outcome = run.start("run", "--prompt-data", tiny / "eval.jsonl")
    assert outcome.code == 2 and "[unfinished-groups-of-other-data]" in outcome.err
    assert str(tiny / "eval.jsonl") in outcome.err and "Fix: resume with the prompts of that run" in outcome.err
    foreign = (folder / "iter_0000001/flow.safetensors").read_bytes()
    for data in (whole[:-1], whole[:100], b"", foreign):
        (folder / "iter_0000002/flow.safetensors").write_bytes(data)
        outcome = run.start("run")
        assert outcome.code == 2 and "[unfinished-groups-unreadable]" in outcome.err, outcome
    (folder / "iter_0000002/flow.safetensors").write_bytes(whole)
    run.finish("run")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["one-off", "async"])
def test_a_kill_at_every_operation(course, mode, capsys):
    """Before each operation, and in the middle of each write; test_resume_kills.py does it at max_lag 0.

    Drops differ from run to run and so does the number of lines about them: the last kills may come too late.
    """
    run = course(mode, rollouts=4)
    recorded = run.reference()
    assert len(recorded) > 150
    points = [(operation, False) for operation in recorded] + [(o, True) for o in recorded if o.tearable]
    landed, failures = 0, {}
    for count, (operation, torn) in enumerate(points, 1):
        wrong = run.killed_at(operation, torn=torn)
        if any(text.startswith("not killed there: exit code 0") for text in wrong):
            continue
        landed += 1
        if wrong:
            failures[f"{'torn ' * torn}{operation}"] = wrong
        if count % 20 == 0 or wrong or count == len(points):
            _tell(capsys, f"{mode}: {landed} kills at {count} of {len(points)} points, {len(failures)} failures "
                          f"{wrong or ''}")
    assert not failures
    assert landed > 0.9 * len(points)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_ten_kills_at_random_moments(course, mode, capsys):
    """Every third run is killed twice."""
    run = course(mode)
    run.reference()
    kills(run, 10, capsys, mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode, lags", [("one-off", (0, 2)), ("async", (1, 0, 5))])
def test_a_killed_run_goes_on_with_another_max_lag(course, mode, lags, capsys):
    """What is too old for it is sampled again, and nothing is lost."""
    for lag in lags:
        run = course(mode, most=max(lag, LAGS[mode]))
        run.reference()
        kills(run, 2, capsys, f"{mode}, then {lag}", then=("--max-lag", str(lag)))


def kills(run: KillResume, count: int, capsys, name: str, then: tuple[str, ...] = ()) -> None:
    draw, landed, failures = random.Random(name), 0, {}
    for attempt in range(4 * count):  # some will have ended before they are killed
        moments = [run.seconds * draw.uniform(0.05, 1.0) for _ in range(1 + (landed % 3 == 0))]
        wrong = run.killed_after(*moments, name=f"random-{attempt}-{''.join(then)}", then=then)
        landed += wrong is not None
        if wrong:
            failures[str(moments)] = wrong
        if landed == count:
            break
    _tell(capsys, f"{name}: {landed} random kills, {len(failures)} failures {failures or ''}")
    assert landed == count and not failures


def _tell(capsys, text: str) -> None:
    with capsys.disabled():
        print(f"\n  {text}", end="", file=sys.stderr, flush=True)
