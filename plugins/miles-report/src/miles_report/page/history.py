"""History: what the events of a run add up to, taken one by one as they come.

A start that resumes at a rollout supersedes what earlier starts wrote about the rollouts from there on, by the rules of
`events.read`; here they are applied when the start is read, so a file that grows is read once.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from miles_core.record.events import LIFECYCLE, Kind, stage_seconds

PACE = 20
"""Rollouts whose pace says when the run will be done."""

QUEUE = ("sampling", "finished", "capacity")
"""Figures of a heartbeat that are drawn over time: groups."""


class Series:
    """One metric against rollouts, in the order in which it came; what is no finite number is NaN."""

    __slots__ = ("x", "y")

    def __init__(self) -> None:
        self.x, self.y = array("d"), array("d")

    def add(self, x: float, value: object) -> None:
        """One more point. Anything but a finite number is kept as a point without a value."""
        finite = isinstance(value, (int, float)) and abs(value) < 1e300
        self.x.append(x)
        self.y.append(value if finite else math.nan)

    def cut(self, begin: float, end: float = math.inf) -> None:
        """Forget the points from `begin` on, up to `end`."""
        keep = [index for index, x in enumerate(self.x) if x < begin or x >= end]
        self.x, self.y = (array("d", [column[index] for index in keep]) for column in (self.x, self.y))


@dataclass(slots=True)
class History:
    """What a run has told so far.

    Args:
        starts: run_start events.
        end: the run_end event of the last start, None while there is none.
        last: unix seconds of the last event.
        before: seconds that earlier starts took.
        curves, evals: metrics by name, against rollouts.
        scores: names of what datasets scored, eval/NAME.
        stages: seconds per stage of each rollout; "step" is the whole of it, where the run says so.
        beats: heartbeat events.
        drops: groups by (rollout, reason).
        syncs: weight_sync events.
        engines: what became of servers and the router in this start, by name.
        log: lines to read, oldest first.
        ends: unix seconds at which this start and its last rollouts ended.
        cuts: how often something that had been taken was superseded.
    """

    starts: list[dict] = field(default_factory=list)
    end: dict | None = None
    last: float | None = None
    before: float = 0.0
    curves: dict[str, Series] = field(default_factory=dict)
    evals: dict[str, Series] = field(default_factory=dict)
    scores: set[str] = field(default_factory=set)
    stages: dict[int, dict[str, float]] = field(default_factory=dict)
    beats: list[dict] = field(default_factory=list)
    drops: Counter = field(default_factory=Counter)
    syncs: list[dict] = field(default_factory=list)
    engines: dict[str, dict] = field(default_factory=dict)
    log: list[dict] = field(default_factory=list)
    ends: deque = field(default_factory=lambda: deque(maxlen=PACE + 1))
    cuts: int = 0
    _evaluated: bool = False
    _lived: float = 0.0

    @property
    def begin(self) -> int:
        """The first rollout of the last start."""
        first = self.starts[-1].get("resumed_from") if self.starts else None
        return first if isinstance(first, int) else 0

    @property
    def done(self) -> int:
        """Rollouts that are trained and not superseded."""
        return max(self.stages, default=-1) + 1

    @property
    def pace(self) -> float | None:
        """Seconds that one of the last rollouts took; None before this start's first, or if the clock went back."""
        seconds = self.ends[-1] - self.ends[0] if len(self.ends) > 1 else -1.0
        return seconds / (len(self.ends) - 1) if seconds >= 0 else None

    def take(self, event: dict) -> None:
        """Add one event. Kinds that are not known are passed over: plugins may write their own."""
        kind = event["event"]
        if kind == Kind.RUN_START:
            self._start(event)
        self.last = event["time"]
        if kind != Kind.MESSAGE:  # a start may say something before its run_start, long after the one before was killed
            self._lived = event["time"]
        if (taker := _TAKERS.get(kind)) is not None:
            taker(self, event)
        if kind in _TOLD or "text" in event:
            self.log.append(_entry(event))

    def _start(self, event: dict) -> None:
        if self.starts:
            self.before += max(0.0, self._lived - self.starts[-1]["time"])
        self.starts.append(event)
        self.end, self.engines, self._evaluated = None, {}, False
        self.ends.clear()
        self.ends.append(event["time"])
        resumed = isinstance(event.get("resumed_from"), int)
        self._cut(self.begin, self.begin + resumed)

    def _cut(self, begin: int, evals: int) -> None:
        """Forget the rollouts from `begin` on, and evaluations from `evals` on."""
        self._forget(self.curves, begin)
        self._forget(self.evals, evals)
        self.stages = {at: seconds for at, seconds in self.stages.items() if at < begin}
        self.drops = Counter({key: count for key, count in self.drops.items() if key[0] is None or key[0] < begin})
        self.syncs, self.beats = ([event for event in events if _stands(event["rollout_id"], begin)]
                                  for events in (self.syncs, self.beats))
        self.log = [entry for entry in self.log if entry["kind"] in LIFECYCLE or _stands(entry["rollout"], begin)]

    def _forget(self, curves: dict[str, Series], begin: float, end: float = math.inf) -> None:
        self.cuts += 1
        for name, series in list(curves.items()):
            series.cut(begin, end)
            if not series.x:
                del curves[name]

    def _metrics(self, event: dict) -> None:
        at, metrics = event["rollout_id"] or 0, event["metrics"]
        for name, value in metrics.items():
            self.curves.setdefault(name, Series()).add(at, value)
        totals = self.stages.setdefault(at, {})
        for stage, seconds in {**stage_seconds(metrics), "step": metrics.get("perf/step_time") or 0.0}.items():
            totals[stage] = totals.get(stage, 0.0) + seconds
        self.ends.append(event["time"])

    def _eval(self, event: dict) -> None:
        at = event["rollout_id"] or 0
        if self.starts and at == self.begin and not self._evaluated:  # the weights it resumed from, evaluated again
            self._evaluated = True
            self._forget(self.evals, at, at + 1)
        self.scores.update(_scores(event["metrics"]))
        for name, value in event["metrics"].items():
            self.evals.setdefault(name, Series()).add(at, value)

    def _drop(self, event: dict) -> None:
        self.drops[event["rollout_id"], str(event.get("reason"))] += event.get("count") or 1

    def _synced(self, event: dict) -> None:
        self.syncs.append(event)
        self._updated(event)

    def _updated(self, event: dict) -> None:
        """Every server that answers has these weights."""
        for engine in self.engines.values():
            if engine["state"] != "lost":
                engine |= {"state": "serving", "version": event.get("version")}

    def _engine(self, event: dict) -> None:
        state = event["event"].partition("_")[2]
        name = str(event.get("engine", "router"))
        engine = self.engines.setdefault(name, {"name": name, "losses": 0, "why": None})
        engine |= {"state": state, "time": event["time"], "version": None}
        engine["losses"] += state == "lost"
        if state != "restarted":
            engine["why"] = str(event.get("why") or f"it answered from version {event.get('says')}")

    def _over(self, event: dict) -> None:
        self.end = event


_TAKERS: dict[str, Callable[[History, dict], None]] = {
    Kind.METRICS: History._metrics, Kind.EVAL: History._eval, Kind.DROP: History._drop,
    Kind.WEIGHT_SYNC: History._synced, Kind.HEARTBEAT: lambda history, event: history.beats.append(event),
    Kind.RUN_END: History._over, Kind.ENGINE_RECOVERED: History._updated,
    **dict.fromkeys((Kind.ENGINE_LOST, Kind.ENGINE_RESTARTED, Kind.ENGINE_STALE, Kind.ROUTER_LOST,
                     Kind.ROUTER_RESTARTED), History._engine),
}  # fmt: skip


def _scores(names: Iterable[str]) -> list[str]:
    """What a dataset scored, eval/NAME, without what its event says beside that: eval/NAME-truncated_ratio and such."""
    scores = [name for name in sorted(names) if name.count("/") == 1 and name.startswith("eval/")
              and name.partition("/")[2] not in ("step", "lag_steps", "duration_seconds", "export_time_seconds")
              and not name.startswith("eval/skipped_")]
    return [name for name in scores if not any(name.startswith(f"{other}-") for other in scores)]


def _stands(rollout: int | None, begin: float) -> bool:
    return rollout is None or rollout < begin


# ------------------------------------------------------------------------------------------------------ lines to read


def _entry(event: dict) -> dict[str, object]:
    """One line of the page's log."""
    level, text = _TOLD.get(event["event"], _said)(event)
    return {"time": event["time"], "kind": event["event"], "level": level, "text": text, "rollout": event["rollout_id"]}


def _started(event: dict) -> tuple[str, str]:
    at = event.get("resumed_from")
    return "info", f"start {event.get('start', 1)}" + ("" if at is None else f", resumed at rollout {at}")


def _ended(event: dict) -> tuple[str, str]:
    level = "info" if event.get("status") == "completed" else "error"
    return level, str(event.get("status")) + (f": {event['error']}" if event.get("error") else "")


def _said(event: dict) -> tuple[str, str]:
    return str(event.get("level", "warning")), str(event["text"])


_TOLD: dict[str, Callable[[dict], tuple[str, str]]] = {
    Kind.RUN_START: _started,
    Kind.RUN_END: _ended,
    Kind.CHECKPOINT: lambda e: ("info", f"{e.get('path')} ({e.get('seconds') or 0:.2f} s)"),
}  # fmt: skip
"""Kind -> level and sentence of the events that are told in words and bring none."""
