"""The document that the page draws: plain values, bounded in size.

    run        name, status, times, rollouts
    curves     {metric: {x, y}} against rollouts; evals names those that are scores
    queue      {figure: {x, y}} against unix seconds, from the heartbeats; beat is the last one
    stages     [{from, to, n, took}]: mean seconds per stage of n rollouts
    hooks        [{plugin, hook, calls, seconds, share}]: of the steps' time, the longest first
    against    [{name, curves}]: other runs, to be compared with
    drops, engines, syncs, log, plan, samples, notes

`document` has all of it. `addition` has the curves, queue, stages and log of a few events only, to be added to what a
page has, and the rest as it is now.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from miles_core.record.directory import RunDirectory
from miles_core.record.events import STAGES
from miles_report.page.history import QUEUE, History, Series


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds the size of the page; it says what was left out.

    Args:
        rollouts: rollouts whose samples are put in, spread evenly, the first and the last included.
        evals: the same for evaluations, shared by all eval datasets (each gets at least two).
        samples: samples in all, shared by the files; a group that was begun is finished, so it may be some more.
        tokens: response tokens of one sample.
        images: of one prompt.
        characters: of one prompt, of one response without tokens, of one message.
        points: of one curve, about; no extreme and no missing value is left out.
        bars: of the time per stage; neighbours are averaged.
        messages: the newest so many.
        megabytes: of samples in all.
    """

    rollouts: int = 30
    evals: int = 36
    samples: int = 2000
    tokens: int = 2000
    images: int = 16
    characters: int = 20_000
    points: int = 1200
    bars: int = 160
    messages: int = 500
    megabytes: float = 8.0


def document(run: RunDirectory, history: History, limits: Limits, status: str) -> dict[str, object]:
    """Everything that the page shows, but for the samples.

    Args:
        status: as `status_of` says.
    """
    log, left = history.log[-limits.messages:], len(history.log) - limits.messages
    if left > 0:
        log = [entry for entry in history.log[:left] if entry["kind"] in ("run_start", "run_end", "restart")] + log
    return {
        **_now(run, history, status),
        **_grown(history, log, limits),
        "against": [],
        "plan": run.plan_text.read_text("utf-8", "replace") if run.plan_text.is_file() else "",
        "notes": [f"{left:,} older messages and checkpoints are left out."] if left > 0 else [],
        "limit": {"points": limits.points, "bars": limits.bars, "messages": limits.messages},
    }


def addition(run: RunDirectory, history: History, later: History, limits: Limits, status: str) -> dict[str, object]:
    """What is to be added to a page that has all of `history` but the events that `later` has taken."""
    return {"part": True, **_now(run, history, status), **_grown(later, later.log[-limits.messages:], limits)}


def status_of(run: RunDirectory, history: History, was_held: bool) -> str:
    """How the run stands.

    Args:
        was_held: whether a process wrote here just before the events were read. So a run that has ended meanwhile has
            either said so or was killed.
    """
    if history.end is not None:
        return str(history.end.get("status"))
    if was_held or run.holder() is not None:  # the second look: it may have begun meanwhile
        return "running" if history.starts else "starting"
    return "killed" if history.starts else "not started"


def _now(run: RunDirectory, history: History, status: str) -> dict[str, object]:
    """What is small, and sent whole each time."""
    first, last = (history.starts[0], history.starts[-1]) if history.starts else ({}, {})
    drops: Counter[str] = Counter()
    for (_, reason), count in history.drops.items():
        drops[reason] += count
    return {
        "run": {
            "name": run.path.resolve().name, "status": status, "error": (history.end or {}).get("error"),
            "plan_hash": last.get("plan_hash"), "versions": last.get("versions") or {},
            "began": first.get("time"), "ended": history.end["time"] if history.end else None,
            "last": history.last, "before": history.before, "pace": history.pace, "written": time.time(),
            "starts": [{"time": s["time"], "from": s.get("resumed_from") or 0} for s in history.starts],
            "done": history.done, "total": last.get("rollouts"),
        },
        "evals": sorted(history.scores & history.evals.keys()),
        "drops": drops.most_common(),
        "engines": list(history.engines.values()),
        "syncs": _syncs(history.syncs),
        "hooks": _hooks(history.curves),
        "beat": history.beats[-1] if history.beats else None,
    }  # fmt: skip


def _grown(history: History, log: list[dict], limits: Limits) -> dict[str, object]:
    """What grows with the run."""
    curves = {**history.curves, **history.evals}
    queue = {name: Series() for name in QUEUE if any(name in beat for beat in history.beats)}
    for beat in history.beats:
        for name, series in queue.items():
            series.add(beat["time"], beat.get(name))
    return {
        "curves": {name: _curve(curves[name], limits.points) for name in sorted(curves)},
        "queue": {name: _curve(series, limits.points, 13) for name, series in queue.items()},
        "stages": _bars(history.stages, limits.bars),
        "log": [{**entry, "text": short(entry["text"], limits.characters)} for entry in log],
    }


def short(text: str, characters: int) -> str:
    """The text, or its beginning with how much there is beyond that."""
    return text if len(text) <= characters else f"{text[:characters]} … ({len(text) - characters:,} more characters)"


def _curve(series: Series, points: int, digits: int = 10) -> dict[str, list]:
    keep = sorted(_kept(series.y, points))
    order = sorted(keep, key=series.x.__getitem__)  # evaluations beside training may come late
    return {"x": [_plain(series.x[i], digits) for i in order],
            "y": [None if math.isnan(series.y[i]) else _plain(series.y[i], 6) for i in order]}


def _kept(ys: Iterable[float], points: int) -> Iterable[int]:
    """Which points to draw: all, or of each stretch the least, the greatest and one without a value; and the last."""
    count = len(ys)
    if count <= points:
        return range(count)
    stride, keep = math.ceil(2 * count / points), {0, count - 1}
    for begin in range(0, count, stride):
        stretch = range(begin, min(begin + stride, count))
        finite = [i for i in stretch if not math.isnan(ys[i])]
        if finite:
            keep |= {min(finite, key=ys.__getitem__), max(finite, key=ys.__getitem__)}
        if len(finite) < len(stretch):
            keep.add(next(i for i in stretch if math.isnan(ys[i])))
    return keep


def _plain(value: float, digits: int) -> float | int:
    value = float(f"{value:.{digits}g}")
    return int(value) if value.is_integer() and abs(value) < 1e15 else value


def _bars(stages: dict[int, dict[str, float]], bars: int) -> list[dict]:
    """Mean seconds per stage of neighbouring rollouts; "other" is what a step took beyond its stages."""
    xs = sorted(at for at, seconds in stages.items() if any(seconds.values()))
    stride, rows = max(1, math.ceil(len(xs) / bars)), []
    for begin in range(0, len(xs), stride):
        bar = xs[begin:begin + stride]
        mean = {stage: sum(stages[at].get(stage, 0.0) for at in bar) / len(bar) for stage in STAGES}
        mean["other"] = sum(_beyond(stages[at]) for at in bar) / len(bar)
        rows.append({"from": bar[0], "to": bar[-1], "n": len(bar),
                      "took": {stage: round(seconds, 4) for stage, seconds in mean.items() if seconds > 0}})
    return rows


def _beyond(seconds_of: dict[str, float]) -> float:
    """Seconds that a step took beyond its stages; 0 where these overlap."""
    return max(0.0, seconds_of["step"] - sum(seconds for stage, seconds in seconds_of.items() if stage != "step"))


def _hooks(curves: dict[str, Series]) -> list[dict[str, object]]:
    def total(name: str) -> float:
        return math.fsum(value for value in curves[name].y if math.isfinite(value)) if name in curves else 0.0

    step, rows = total("perf/step_time"), []
    for name in curves:
        if name.startswith("perf/hooks/"):
            plugin, _, hook = name.removeprefix("perf/hooks/").partition("/")
            seconds, calls = total(name), total(f"perf/hook_calls/{plugin}/{hook}")
            rows.append({"plugin": plugin, "hook": hook, "calls": int(calls), "seconds": round(seconds, 6),
                          "share": round(seconds / step, 6) if step else None})
    return sorted(rows, key=lambda row: -row["seconds"])


def _syncs(syncs: list[dict]) -> dict[str, object] | None:
    if not syncs:
        return None
    return {"count": len(syncs), "version": syncs[-1].get("version"), "bytes": syncs[-1].get("bytes"),
            "tensors": syncs[-1].get("tensors"), "time": syncs[-1]["time"],
            "seconds": sum(s.get("seconds") or 0 for s in syncs) / len(syncs)}
