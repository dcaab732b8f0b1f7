"""Kill and resume: whether a killed and resumed run gives the same result as one that was never killed."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from miles_core.record.events import read
from miles_core.record.replay import FLOW, load_batch, load_flow
from miles_core.types import Drop, Group
from miles_testing.faults import Faults, Operation, operations, untraced
from miles_testing.forked import Outcome, miles

LEFTOVERS = ("*.publishing", ".tmp-*", "*.tmp")


class KillResume:
    """One command in many folders below `path`, each time into the run directory "run" there.

    Args:
        argv: what follows `miles run`.
        rollouts: how many it does.
        judge: what is wrong with a run directory whose run was killed and has ended well. By default all that tells it
            from the reference; with another judge its operations need not come in the reference's order either.
    """

    def __init__(self, path: Path, argv: Sequence[str | Path], *, rollouts: int,
                 judge: Callable[[Path], list[str]] | None = None):
        self.path, self.rollouts = path, rollouts
        self.argv = ["run", *argv, "--no-live", "--run-dir", "run", "--save", "run/checkpoints", "--load",
                     "run/checkpoints", "--num-rollout", str(rollouts)]
        self.seconds, self.exact = 0.0, judge is None
        self.judge = judge or (lambda run: problems(run, path / "reference/run", rollouts=rollouts))

    def start(self, name: str, *more: str | Path, **options: Any) -> Outcome:
        """The command in folder `name`, once."""
        (self.path / name).mkdir(exist_ok=True)
        return miles([*self.argv, *more], self.path / name, **options)

    def finish(self, name: str, *more: str | Path, **options: Any) -> Path:
        """The command, which has to end well; gives its run directory."""
        outcome = self.start(name, *more, **options)
        assert outcome.code == 0, f"{name}: exit code {outcome.code}\n{outcome.err[-3000:]}"
        return self.path / name / "run"

    def reference(self) -> list[Operation]:
        """The run that is not killed, in folder "reference", and what it does to its files."""
        self.start("reference", "--plan")  # the first command waits until the fork server has done its imports
        begin = time.monotonic()
        self.finish("reference", before=self.faults("reference"))
        self.seconds = time.monotonic() - begin
        assert not (missed := untraced(self.log("reference"))), f"changed behind our back: {missed}"
        return operations(self.log("reference"))

    def faults(self, name: str, kill: int | None = None, torn: int = 0) -> Faults:
        """What traces a run in folder `name`."""
        return Faults(self.path / name / "run", self.log(name), kill, torn)

    def log(self, name: str) -> Path:
        return self.path / name / "operations"

    def killed_at(self, operation: Operation, *, torn: bool = False, again: int | None = None) -> list[str]:
        """Kill a run at an operation of the reference and resume it; what is wrong with the result.

        Args:
            torn: let half of what it writes pass.
            again: kill the resumed run as well, at its operation of this number, and resume that.
        """
        name = f"{'torn' if torn else 'before'}-{operation.number}-{again}"
        outcome = self.start(name, before=self.faults(name, operation.number, operation.size // 2 if torn else 0))
        last = operations(self.log(name))[-1]
        same = not self.exact or (last.kind, last.path) == (operation.kind, operation.path)
        if outcome.code != -9 or not same:
            return [f"not killed there: exit code {outcome.code} at {last}\n{outcome.err[-2000:]}"]
        if again is not None:
            self.log(name).unlink()
            outcome = self.start(name, before=self.faults(name, again))
            if outcome.code != -9:
                return [f"not killed again: exit code {outcome.code}\n{outcome.err[-2000:]}"]
        return self.resumed(name)

    def killed_after(self, *seconds: float, name: str, then: Sequence[str] = ()) -> list[str] | None:
        """Kill a run from outside after some time and resume it; None when it had ended before.

        Args:
            seconds: one or several: the resumed run is killed as well, and that is resumed.
            then: flags of the last start.
        """
        for moment in seconds:
            def kill(process: BaseProcess, moment: float = moment) -> None:
                process.join(moment)
                process.kill()

            if self.start(name, while_running=kill).code != -9:
                return None
        return self.resumed(name, *then)

    def resumed(self, name: str, *more: str) -> list[str]:
        """Run the command again in a folder; what is wrong with its run."""
        outcome = self.start(name, *more)
        if outcome.code != 0:
            return [f"the resumed run ends with exit code {outcome.code}: {outcome.err[-2000:]}"]
        differences = self.judge(self.path / name / "run")
        if not differences:
            shutil.rmtree(self.path / name)
        return differences


def problems(run: Path, reference: Path, *, rollouts: int, ends: int = 1) -> list[str]:
    """What tells a finished run from the reference, which was never killed; empty when nothing does.

    Args:
        rollouts: how many both have done.
        ends: starts of the run that came to their end.
    """
    ours, theirs = list(read(run / "events.jsonl")), list(read(reference / "events.jsonl"))
    differences = _whole(run, ours, rollouts, ends)
    compared: tuple[tuple[str, Callable[[Any], dict[int, Any]]], ...] = (("metrics", metrics), ("drops", drops))
    for name, of in compared:
        if of(ours) != of(theirs):
            differences.append(f"{name} differ: {_first_difference(of(ours), of(theirs))}")
    differences += _evals(ours, theirs)
    for name, read_of in (("samples", samples), ("checkpoint", checkpoint), ("export", export)):
        mine, other = read_of(run), read_of(reference)
        if wrong := [key for key in other if mine.get(key) != other[key]]:
            differences.append(f"{name} differ: {wrong}")
    return differences


def problems_ahead(run: Path, *, rollouts: int, max_lag: int, surplus: bool = False, ends: int = 1) -> list[str]:
    """What a finished run breaks of the promises for max_lag > 0; empty when nothing. It has to keep its batches:

        --save-debug-rollout-data run/debug/{rollout_id}.safetensors

    Each rollout is done once. No token is older than `max_lag` versions. Of the prompts that were handed out each was
    trained on once, dropped, or is to come. A group that a checkpoint holds finished is trained on as it is there.

    Args:
        max_lag: the largest of its starts.
        surplus: finished groups may have been sampled again, from later weights: by over-sampling, or since a start
            had a smaller max_lag.
        ends: starts of the run that came to their end.
    """
    broken = _whole(run, list(read(run / "events.jsonl")), rollouts, ends) + lost_or_doubled(run)
    batches = [load_batch(str(run / "debug/{rollout_id}.safetensors"), rollout) for rollout in range(rollouts)]
    reported = [path.read_bytes().splitlines() for path in sorted(run.glob("samples/rollout_*.jsonl"))]
    for batch, lines in zip(batches, reported, strict=True):
        shown = [(line["prompt_uid"], line["index"], line["token_ids"], line["versions"])
                 for line in map(json.loads, lines)]
        if shown != [(s.prompt.uid, s.index, s.tokens[-s.response_length:].tolist(), s.columns["versions"].tolist())
                     for s in batch.samples]:
            broken.append(f"rollout {batch.rollout_id} was trained on other samples than were handed over")
        versions = {version for _, _, _, versions_of_sample in shown for version in versions_of_sample}
        if not batch.rollout_id + 1 - max_lag <= min(versions) <= max(versions) <= batch.rollout_id + 1:
            broken.append(f"rollout {batch.rollout_id} was trained on versions {sorted(versions)}")
    trained = {group.prompt.uid: group for batch in batches for group in batch.groups}
    for done, groups in finished(run):
        for group in groups:
            later = trained.get(group.prompt.uid)
            if later is None or contents(later) == contents(group):
                continue
            anew = all(s.columns["versions"].min() > done for s in later.samples)
            if not (surplus and anew):
                broken.append(f"prompt {group.prompt.uid} was finished at checkpoint {done} and trained on otherwise")
    return broken


def finished(run: Path) -> Iterator[tuple[int, list[Group]]]:
    """Of every checkpoint: how many rollouts were done, and the groups that were sampled and not trained on yet."""
    for folder in sorted(run.glob("checkpoints/iter_*")):
        state = json.loads((folder / "miles.json").read_text())
        files = {FLOW: (folder / FLOW).read_bytes()} if (folder / FLOW).exists() else {}
        slots, _ = load_flow({**state["state"], "files": files})
        yield state["iteration"], [slot.group for slot in slots if slot.group and not isinstance(slot.outcome, Drop)]


def contents(group: Group) -> list[tuple[Any, ...]]:
    """What was sampled and how it was scored, to the bit."""
    return [(s.index, s.text, s.status, s.rewards, {name: array.tobytes() for name, array in s.columns.items()})
            for s in group.samples]


def leftovers(run: Path) -> list[str]:
    """Temporary files and folders below a run directory."""
    return sorted(str(path.relative_to(run)) for pattern in LEFTOVERS for path in run.rglob(pattern))


def metrics(events: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """Of each rollout, without the times."""
    return {event["rollout_id"]: {k: v for k, v in event["metrics"].items() if not k.startswith("perf/")}
            for event in events if event["event"] == "metrics"}


def drops(events: list[dict[str, Any]]) -> dict[int, dict[str, int]]:
    """Of each rollout, by reason."""
    counts_by_rollout: dict[int, dict[str, int]] = {}
    for event in events:
        if event["event"] == "drop":
            counts = counts_by_rollout.setdefault(event["rollout_id"], {})
            counts[event["reason"]] = counts.get(event["reason"], 0) + event["count"]
    return counts_by_rollout


def samples(run: Path) -> dict[str, str]:
    """Digest of each file of samples."""
    return _digests(run / "samples", run.glob("samples/*.jsonl"))


def checkpoint(run: Path) -> dict[str, str]:
    """Digests of the last checkpoint: tensors (weights, Adam's moments), schedule, the run's own state.

    The lock, which tells of options and versions, is no part of it: equal results may come of others.
    """
    folder = run / "checkpoints"
    last = folder / f"iter_{int((folder / 'latest_checkpointed_iteration.txt').read_text()):07d}"
    names = (".metadata", "common.pt", "miles.json")  # the first two hold their own name
    numbers = {str(path.relative_to(last)): repr(torch.load(path, weights_only=True))
               for path in sorted(last.rglob("common.pt"))}
    files = (path for path in last.rglob("*") if path.is_file() and path.name not in names)
    state = json.loads((last / "miles.json").read_text())["state"]
    numbers["miles.json"] = json.dumps({key: value for key, value in state.items() if key != "lock"})
    return {"name": last.name} | numbers | _digests(last, files)


def export(run: Path) -> dict[str, str]:
    """Digests of the Hugging Face exports under hf/."""
    return _digests(run, run.glob("hf/*/*.safetensors"))


def trained(run: Path) -> list[list[int]]:
    """The prompts that each rollout was trained on."""
    return [list(dict.fromkeys(json.loads(line)["prompt_uid"] for line in path.read_bytes().splitlines()))
            for path in sorted(run.glob("samples/rollout_*.jsonl"))]


def lost_or_doubled(run: Path) -> list[str]:
    """Whether each prompt that the final checkpoint says was handed out was trained on once, dropped, or is to come."""
    folder = run / "checkpoints"
    last = int((folder / "latest_checkpointed_iteration.txt").read_text())
    saved = json.loads((folder / f"iter_{last:07d}" / "miles.json").read_text())["state"]
    state = saved["prompts"]
    times = Counter(uid for rollout in trained(run) for uid in rollout)
    dropped = sum(sum(counts.values()) for counts in drops(list(read(run / "events.jsonl"))).values())
    broken = [f"prompt {uid} was trained on {count} times" for uid, count in times.items() if count > 1]
    broken += [f"prompt {uid} was trained on and is to come again" for uid in state["again"] if uid in times]
    under_way = [slot["prompt"]["uid"] for slot in saved.get("flow", {}).get("slots", ())]
    broken += [f"prompt {uid} was trained on and is still under way" for uid in under_way if uid in times]
    known = len(times) + dropped + len(state["again"]) + len(under_way) + len(saved.get("flow", {}).get("begun", ()))
    if known != state["next"]:
        broken.append(f"{state['next']} prompts were handed out, and {known} are accounted for")
    return broken


def _whole(run: Path, events: list[dict[str, Any]], rollouts: int, ends: int) -> list[str]:
    """What is wrong with any run that has ended: temporary files, its ends, its rollouts."""
    done = [event["rollout_id"] for event in events if event["event"] == "metrics"]
    wrong = [] if done == list(range(rollouts)) else [f"rollouts in the lineage: {done}"]
    return [f"left behind: {path}" for path in leftovers(run)] + _ending(events, ends) + wrong


def _ending(events: list[dict[str, Any]], ends: int) -> list[str]:
    statuses = [event["status"] for event in events if event["event"] == "run_end"]
    good = statuses == ["completed"] * ends and events[-1]["event"] == "run_end"
    return [] if good else [f"ends: {statuses}, and last {events[-1]['event']}"]


def _evals(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> Iterator[str]:
    """A resumed run evaluates the weights that it starts from, so it may have some more than the reference."""
    pairs = [(event["rollout_id"], event["metrics"]) for event in ours if event["event"] == "eval"]
    wanted = {event["rollout_id"]: event["metrics"] for event in theirs if event["event"] == "eval"}
    for rollout, count in Counter(rollout for rollout, _ in pairs).items():
        if count > 1 and rollout in wanted:
            yield f"rollout {rollout} has {count} evaluations"
    for rollout, values in wanted.items():
        if dict(pairs).get(rollout) != values:
            yield f"the evaluation at rollout {rollout} differs"


def _digests(root: Path, paths: Iterator[Path]) -> dict[str, str]:
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(paths)}


def _first_difference(ours: dict[int, Any], theirs: dict[int, Any]) -> str:
    key = next(key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key))
    mine, other = ours.get(key, {}), theirs.get(key, {})
    lines = [f"{name} {mine.get(name)} instead of {other.get(name)}" for name in dict.fromkeys((*other, *mine))
             if mine.get(name) != other.get(name)]
    return f"rollout {key}: {', '.join(lines)}"
