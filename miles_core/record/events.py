"""events.jsonl: what happened in a run, one JSON object a line, appended and never rewritten.

    {"event": kind, "time": unix seconds, "rollout_id": number or null, ...}

JSON knows no NaN and no infinity: such a number is null, and the line's "nonfinite" lists the names concerned.

A run that is resumed at rollout k does the rollouts from k on again; what earlier starts wrote about them is
superseded, and `read` leaves it out. The rest is the surviving lineage: the history of the weights that exist. An eval
is of the weights that its rollout samples from, so one at rollout k is of the checkpoint and survives, unless the
resumed start has evaluated these weights again.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path

from miles_core.errors import MilesError, RunDirectoryError
from miles_core.record.directory import explained, sync


class Kind(StrEnum):
    """What a line tells, with its further keys; plugins may write kinds of their own. The `text` of any is told to the
    person, too, as a warning or as its `level` says."""

    RUN_START = "run_start"  # start (from 1), plan_hash, versions {distribution: version}, resumed_from, rollouts
    METRICS = "metrics"  # metrics {name: number}
    EVAL = "eval"  # metrics {name: number}
    EVAL_WEIGHTS = "eval_weights"  # version, seconds
    EVAL_SKIPPED = "eval_skipped"  # under_way: the rollout whose evaluation is
    EVAL_MISSING = "eval_missing"  # why
    WEIGHT_SYNC = "weight_sync"  # version, seconds, tensors, bytes
    DROP = "drop"  # reason, count, ...
    HEARTBEAT = "heartbeat"  # sampling, finished, dropped, capacity, version, oldest_s, idle_s; blocked_s and by whom
    LOOP_BLOCKED = "loop_blocked"  # seconds, plugin, hook, where (FILE:LINE FUNCTION): what has kept the event loop
    CHECKPOINT = "checkpoint"  # path, seconds, staged: not published yet (--async-save)
    HASHES = "hashes"  # in hashes.jsonl: weights {name: hash}, batch {column: hash}
    MESSAGE = "message"  # level, text
    ENVIRONMENT = "environment"  # role, variables {name: value} that change how its processes compute or talk
    REQUEST_FAILED = "request_failed"  # request, attempt, why
    ENGINE_LOST, ROUTER_LOST, READER_LOST = "engine_lost", "router_lost", "reader_lost"  # engine or reader, why
    ENGINE_RESTARTED, ROUTER_RESTARTED = "engine_restarted", "router_restarted"  # engine, restarts
    ENGINE_COMPILES = "engine_compiles"  # engine, what, limit
    ENGINE_STALE = "engine_stale"  # engine, says, expected
    ENGINE_RECOVERED = "engine_recovered"  # version, tensors, bytes: a restarted server has the weights that it should
    RESTART = "restart"  # count, most, culprit, error, resumes: the checkpoint, null from the start
    RUN_END = "run_end"  # status, error, code (of an error of Miles)


LIFECYCLE = frozenset({Kind.RUN_START, Kind.RUN_END, Kind.MESSAGE, Kind.ENVIRONMENT, Kind.ENGINE_RECOVERED,
                       Kind.RESTART})
"""Kinds that tell of a start rather than of the weights: never superseded."""

LATEST = 1e12
"""No time in unix seconds, and no rollout, gets there."""


class EventLog:
    """Appends to events.jsonl; safe to call from several threads.

    Each line is one os.write to an O_APPEND descriptor, so a kill leaves at most one torn last line. A power cut may
    also leave zeros from some line on that was never synced. Opening a file cuts such an end off and counts the starts
    before this one.

    Raises:
        RunDirectoryError: the file cannot be written, the disk is full, or a line in the middle is damaged.
    """

    def __init__(self, path: str | os.PathLike[str], clock: Callable[[], float] = time.time):
        self.path = Path(path)
        self._clock, self._mutex = clock, threading.Lock()
        with explained(self.path):
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            _cut_torn_end(self._file)
            sync(self.path.parent)
        self.starts = sum(event["event"] == Kind.RUN_START for event in read(self.path, everything=True))
        """How many starts the file tells of, the current one included once `run_start` was called."""

    def append(self, event: str, /, rollout_id: int | None = None, **fields: object) -> None:
        """Write one event of any kind; plugins may have their own."""
        record: dict[str, object] = {"event": event, "time": round(self._clock(), 3), "rollout_id": rollout_id}
        if taken := record.keys() & fields.keys():
            raise ValueError(f"an event's own keys cannot be given: {sorted(taken)}")
        nonfinite: list[str] = []
        record.update({key: _strict(value, key, nonfinite) for key, value in fields.items()})
        if nonfinite:
            record["nonfinite"] = nonfinite
        text = json.dumps(record, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        self._write(text.encode("utf-8", "backslashreplace") + b"\n")

    def run_start(self, plan_hash: str, versions: Mapping[str, str], *, resumed_from: int | None = None,
                  rollouts: int | None = None) -> None:
        """A start begins.

        Args:
            resumed_from: the first rollout that this start does, None from scratch. What earlier starts wrote about
                rollouts from there on is superseded.
            rollouts: how many there are to be in all.
        """
        self.starts += 1
        self.append(Kind.RUN_START, start=self.starts, plan_hash=plan_hash, versions=dict(versions),
                    resumed_from=resumed_from, rollouts=rollouts)

    def run_end(self, status: str, error: object = None) -> None:
        code = error.code if isinstance(error, MilesError) else None
        self.append(Kind.RUN_END, status=status, error=None if error is None else str(error), code=code)

    def sync(self) -> None:
        """Have what was appended outlast a power cut."""
        with self._mutex, explained(self.path):
            os.fsync(self._file)

    def close(self) -> None:
        """Close the descriptor; nothing is buffered, so nothing can be lost by not calling this."""
        with self._mutex:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def _write(self, line: bytes) -> None:
        with self._mutex, explained(self.path):
            if self._file < 0:
                raise ValueError(f"{self.path} is closed")
            size = os.fstat(self._file).st_size
            written = 0
            try:
                while written < len(line):  # once, unless the disk fills up or a signal interrupts
                    written += os.write(self._file, line[written:])
            except OSError:
                os.ftruncate(self._file, size)
                raise


def read(path: str | os.PathLike[str], *, everything: bool = False, only: tuple[bytes, ...] = (b"",)) -> Iterator[dict]:
    """The events of a file, in order; a torn last line is passed over.

    Args:
        everything: also what later starts have superseded.
        only: lines that contain none of these are not parsed, such as b'"eval"'.

    Raises:
        RunDirectoryError: a line other than the last is damaged.
    """
    limits = [] if everything else _limits(path)
    start = 0
    for event in _lines(path, (*only, b'"run_start"')):
        start += event["event"] == Kind.RUN_START
        lasts = event["event"] in LIFECYCLE or event["rollout_id"] is None or start >= len(limits)
        if lasts or event["rollout_id"] < limits[start][event["event"] == Kind.EVAL]:
            yield event


def stage_seconds(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Seconds of each of STAGES of one rollout that took any, nothing counted twice, from its perf/ metrics.

    The loop's train_time includes the passes for log-probs, which are the stage "score" here; most trainers time their
    steps alone as well.
    """
    def took(*names: str) -> float:
        return sum(metrics.get(f"perf/{name}_time") or 0.0 for name in names)

    score = took("log_probs", "ref_log_probs", "teacher_log_probs")
    train = took("actor_train") or max(0.0, took("train") - score)
    spent = zip(STAGES, (took("rollout"), score, train, took("update_weights")), strict=True)
    return {stage: seconds for stage, seconds in spent if seconds > 0}


STAGES = ("rollout", "score", "train", "sync")


def _limits(path: str | os.PathLike[str]) -> list[tuple[float, float]]:
    """For each start: the rollout from which its events, and its evals, are superseded by later starts. The last start
    has none, nor has one that a running run adds meanwhile. Index 0 is what comes before any start."""
    begins: list[list[int]] = []  # [first rollout, from where earlier evals are superseded]
    for event in _lines(path, only=(b'"run_start"', b'"eval"')):
        if event["event"] == Kind.RUN_START:
            first = event.get("resumed_from")
            begins.append([first, first + 1] if isinstance(first, int) else [0, 0])
        elif event["event"] == Kind.EVAL and begins and event["rollout_id"] == begins[-1][0]:
            begins[-1][1] = begins[-1][0]
    limits = [(math.inf, math.inf)]
    for begin, evals in reversed(begins):
        limits.append((min(limits[-1][0], begin), min(limits[-1][1], evals)))
    return limits[::-1]


def _lines(path: str | os.PathLike[str], only: tuple[bytes, ...] = (b"",)) -> Iterator[dict]:
    """Parsed whole lines; those that contain none of `only` are not even parsed."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n") or b"\0" in line:  # torn: the last one; or never synced before a power cut
                return
            if any(word in line for word in only):
                yield parsed(line, number, path)


def parsed(line: bytes, number: int, path: str | os.PathLike[str]) -> dict:
    """One whole line as an event.

    Raises:
        RunDirectoryError: it is damaged; names line and file.
    """
    try:
        event = json.loads(line)
        rollout, metrics = event["rollout_id"], event.get("metrics", {})
        if not (isinstance(event["event"], str) and abs(event["time"]) < LATEST
                and all(value is None or abs(value) < math.inf for value in metrics.values())
                and (rollout is None or isinstance(rollout, int) and abs(rollout) < LATEST)):
            raise ValueError("values of another kind")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RunDirectoryError(f"line {number} is damaged", code="events-damaged",
                                got=line[:60].decode("utf-8", "replace").rstrip(), who=str(path),
                                fix="remove the line; the other lines do not depend on it") from error
    return event


def _cut_torn_end(file: int) -> None:
    """Truncate to the end of the last whole line before any zero, which is no character of JSON."""
    end = at = 0
    while block := os.pread(file, 1 << 20, at):
        zero = block.find(b"\0")
        newline = block.rfind(b"\n", 0, zero if zero >= 0 else len(block))
        end = at + newline + 1 if newline >= 0 else end
        if zero >= 0:
            break
        at += len(block)
    if end < os.fstat(file).st_size:
        os.ftruncate(file, end)


def _strict(value: object, name: str, nonfinite: list[str], top: bool = True) -> object:
    """`value` as strict JSON: numpy becomes plain, what is not finite becomes null and its name is noted."""
    if isinstance(value, Mapping):
        return {str(key): _strict(item, str(key) if top else f"{name}.{key}", nonfinite, False)
                for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item, f"{name}.{index}", nonfinite, False) for index, item in enumerate(value)]
    if hasattr(value, "tolist"):
        return _strict(value.tolist(), name, nonfinite, top)
    if isinstance(value, float) and not math.isfinite(value):
        nonfinite.append(name)
        return None
    return value if value is None or isinstance(value, (str, int, float)) else str(value)
