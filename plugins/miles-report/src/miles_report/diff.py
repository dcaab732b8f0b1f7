"""miles diff: where two runs part, from their run directories alone.

With --debug-determinism a run records a total of its weights and of its batch at every rollout (events.jsonl) and the
hash of each tensor and column (hashes.jsonl). The totals name the first rollout that differs, the hashes what differs
in it, and the first column in the order of the loop says which side of the loop parted from the other run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from miles_core.errors import RunDirectoryError
from miles_core.record.directory import RunDirectory
from miles_core.record.events import Kind, read

SIDES = ("rollout", "reward", "plugin", "score", "advantage", "step")
"""Where runs can part, in the order of the loop; "plugin" is a column of a plugin, "score" are passes for log-probs."""

_COLUMNS = {"tokens": "rollout", "loss_mask": "rollout", "versions": "rollout", "rollout_log_probs": "rollout",
            "reward": "reward", "log_probs": "score", "ref_log_probs": "score", "advantages": "advantage"}


@dataclass(slots=True)
class Record:
    """What a run wrote about itself, superseded rollouts left out.

    Args:
        facts: label -> what the run was resolved to, such as {"optimizer.lr": 1e-6, "plugin grpo": "miles-grpo 0.1.0"}.
        totals: rollout -> {"weights", "batch", "grad_norm"}; empty without --debug-determinism.
        metrics: rollout -> metrics, times left out; None is a number that was not finite.
        evaluations: rollout before which they were made -> metrics.
        status: "completed", "failed", "interrupted", or None: it is running, or was killed.
    """

    directory: RunDirectory
    facts: dict[str, object] = field(default_factory=dict)
    totals: dict[int, dict] = field(default_factory=dict)
    metrics: dict[int, dict[str, float | None]] = field(default_factory=dict)
    evaluations: dict[int, dict[str, float | None]] = field(default_factory=dict)
    status: str | None = None

    def hashes(self, rollout_id: int) -> dict[str, dict[str, str]]:
        """{"weights": {name: hash}, "batch": {column: hash}} of a rollout; empty where the file is gone.

        A rollout that was done again stands there twice, and the last one counts.
        """
        hashes: dict[str, dict[str, str]] = {}
        for line in read(self.directory.hashes, everything=True) if self.directory.hashes.is_file() else ():
            if line["rollout_id"] == rollout_id:
                hashes = line
        return {part: hashes.get(part, {}) for part in ("weights", "batch")}


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of two runs.

    Args:
        part: "batch", "weights", "grad_norm" or "metrics".
        side: one of SIDES; None for metrics, which do not say.
        names: what differs, in the order of the loop or of the model; empty if only the total is on record.
        of: how many of them there are.
        values: of the first name in both runs; hashes unless the part is one of numbers.
    """

    rollout_id: int
    part: str
    side: str | None
    names: list[str]
    of: int
    values: tuple[object, object]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare` found.

    Args:
        by: "hashes", or "metrics" where one run has no hashes.
        facts: (label, in A, in B) of what differs in plan and versions; a side that lacks it has "absent".
        rollouts: those on record in A and in B.
    """

    by: str
    facts: list[tuple[str, object, object]]
    rollouts: tuple[list[int], list[int]]
    first: Difference | None

    @property
    def common(self) -> list[int]:
        """The rollouts that were compared."""
        return sorted(set(self.rollouts[0]) & set(self.rollouts[1]))

    @property
    def exit_code(self) -> int:
        """0 the same, 1 different or of different length, 2 not known: equal metrics prove nothing."""
        if self.first is not None or self.rollouts[0] != self.rollouts[1]:
            return 1
        return 0 if self.by == "hashes" else 2


def load(path: str | os.PathLike[str]) -> Record:
    """What a run directory tells.

    Raises:
        RunDirectoryError: this is no run, or a file of it is damaged.
    """
    record, versions = Record(RunDirectory.existing(path)), {}
    for event in read(record.directory.events) if record.directory.events.is_file() else ():
        match event["event"]:
            case Kind.RUN_START:
                versions, record.status = event["versions"], None
            case Kind.RUN_END:
                record.status = event["status"]
            case Kind.HASHES:
                record.totals[event["rollout_id"]] = {key: event.get(key) for key in ("batch", "weights", "grad_norm")}
            case Kind.METRICS:
                metrics = {name: value for name, value in event["metrics"].items() if not name.startswith("perf/")}
                record.metrics[event["rollout_id"]] = metrics
            case Kind.EVAL:
                record.evaluations.setdefault(event["rollout_id"], {}).update(event["metrics"])
    record.facts = _facts(record.directory, versions)
    return record


def compare(one: Record, other: Record) -> Comparison:
    """Plan, versions, and the first rollout on record in both that is not the same.

    Raises:
        RunDirectoryError: there is no rollout that both have.
    """
    by = "hashes" if one.totals and other.totals else "metrics"
    left, right = (one.totals, other.totals) if by == "hashes" else (one.metrics, other.metrics)
    if not left and not right:  # both only evaluate
        left, right = one.evaluations, other.evaluations
    common = sorted(left.keys() & right.keys())
    if not common:
        raise RunDirectoryError("these runs have no rollout in common", who=f"{one.directory}, {other.directory}",
                                got=f"rollouts {span(left)} and {span(right)}", code="runs-without-common-rollout",
                                fix="run both for the same rollouts, with --debug-determinism")
    facts = [(label, *pair) for label, *pair in _pairs(one.facts, other.facts) if pair[0] != pair[1]]
    alone = {label.removeprefix("plugin ") for label, *pair in facts if label[:7] == "plugin " and "absent" in pair}
    facts = [fact for fact in facts if fact[0].partition(".")[0] not in alone]  # its options go without saying
    parting = next((rollout_id for rollout_id in common if left[rollout_id] != right[rollout_id]), None)
    if parting is None:
        first = None
    elif by == "metrics":
        first = _difference(parting, "metrics", None, left[parting], right[parting])
    else:
        first = _by_hashes(parting, one, other)
    return Comparison(by, facts, (sorted(left), sorted(right)), first)


def span(rollouts: Iterable[int]) -> str:
    """Rollouts for people: "0 to 9", or "none"."""
    ordered = sorted(rollouts)
    if not ordered:
        return "none"
    return str(ordered[0]) if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]}"


def _by_hashes(rollout_id: int, one: Record, other: Record) -> Difference:
    """What differs in a rollout whose totals do: the batch comes before the step that is made of it."""
    totals = one.totals[rollout_id], other.totals[rollout_id]
    part = next(part for part in ("batch", "weights", "grad_norm") if totals[0][part] != totals[1][part])
    if part == "grad_norm":
        return _difference(rollout_id, part, "step", *({part: total[part]} for total in totals))
    left, right = (record.hashes(rollout_id)[part] for record in (one, other))
    if not left or not right:
        values = totals[0][part], totals[1][part]
        return Difference(rollout_id, part, "step" if part == "weights" else None, [], 0, values)
    if part == "weights":
        return _difference(rollout_id, part, "step", left, right)
    order = sorted(left.keys() | right.keys(), key=lambda name: (SIDES.index(_side(name)), _place(name)))
    left, right = ({name: hashes[name] for name in order if name in hashes} for hashes in (left, right))
    return _difference(rollout_id, part, _side(next(n for n in order if left.get(n) != right.get(n))), left, right)


def _difference(rollout_id: int, part: str, side: str | None, left: Mapping, right: Mapping) -> Difference:
    pairs = _pairs(left, right)
    names = [name for name, a, b in pairs if a != b]
    values = next((a, b) for name, a, b in pairs if a != b)
    return Difference(rollout_id, part, side, names, len(pairs), values)


def _pairs(left: Mapping, right: Mapping) -> list[tuple[str, object, object]]:
    """(name, left, right) of every name of either, in order."""
    return [(name, left.get(name, "absent"), right.get(name, "absent")) for name in {**left, **right}]


def _side(column: str) -> str:
    return _COLUMNS.get(column) or ("score" if column.endswith("log_probs") else "plugin")


def _place(column: str) -> int:
    return list(_COLUMNS).index(column) if column in _COLUMNS else len(_COLUMNS)


def _facts(directory: RunDirectory, versions: Mapping[str, str]) -> dict[str, object]:
    """The plan and the versions as one table. The run's own folder is left out of paths, so that it never differs."""
    try:
        plan = json.loads(directory.plan_json.read_text("utf-8")) if directory.plan_json.is_file() else {}
        options = dict(plan.get("options", {}))
        run_dir = options.pop("checkpoint.run_dir", None)
        facts = {f"plugin {one['name']}": f"{one['source']} {one['version']}" for one in plan.get("plugins", ())}
        for hook, name, plugin, _ in plan.get("owners", ()):
            facts[f"owner of {hook}"] = [*facts.get(f"owner of {hook}", ()), f"{name} ({plugin})"]
        facts |= {f"order of {hook}": names for hook, names in plan.get("order", {}).items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RunDirectoryError("plan.json is damaged", code="plan-json-damaged", got=str(error), who=str(directory),
                                fix="remove it to compare the results alone") from None
    for key, value in options.items():
        within = run_dir and isinstance(value, str) and (value == run_dir or value.startswith(f"{run_dir}/"))
        facts[key] = "{run_dir}" + value[len(run_dir):] if within else value
    return facts | {f"version of {name}": version for name, version in versions.items()
                    if f"plugin {name}" not in facts}
