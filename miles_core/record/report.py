"""miles report: a run as one HTML page that needs no network and no server.

The page is report.html with the run's data put in as JSON. What generated text holds is never markup: the JSON is
escaped so that it cannot leave its script element, and the page sets text through textContent alone.
"""

from __future__ import annotations

import html
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from miles_core.record.directory import RunDirectory, publish
from miles_core.record.events import STAGES, read, stage_seconds
from miles_core.record.journal import told_restart
from miles_core.record.samples import list_samples, read_samples

TEMPLATE = Path(__file__).with_name("report.html")


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds the size of the page; it says what was left out.

    Args:
        rollouts: rollouts whose samples are put in, spread evenly, the first and the last included.
        evals: the same for evaluations, shared by all eval datasets (each gets at least two).
        samples: samples in all, shared by the files; a group that was begun is finished, so it may be some more.
        tokens: response tokens of one sample.
        characters: of one prompt, of one response without tokens, of one message.
        points: of one curve.
        messages: the newest so many.
        megabytes: of samples in all.
    """

    rollouts: int = 30
    evals: int = 36
    samples: int = 2000
    tokens: int = 2000
    characters: int = 20_000
    points: int = 1500
    messages: int = 500
    megabytes: float = 8.0


@dataclass(slots=True)
class _History:
    """What the events of a run add up to."""

    starts: list[dict] = field(default_factory=list)
    end: dict | None = None
    last_time: float | None = None
    curves: dict[str, dict[int, list[float | None]]] = field(default_factory=dict)
    stages: dict[int, dict[str, float]] = field(default_factory=dict)
    drops: Counter = field(default_factory=Counter)
    log: list[dict] = field(default_factory=list)
    syncs: list[dict] = field(default_factory=list)
    done: int = 0


def write_report(run_dir: str | os.PathLike[str], out: str | os.PathLike[str] | None = None,
                 limits: Limits | None = None) -> Path:
    """Write the report of a run, finished or not, and return where it is: `out`, or report.html in the run.

    Raises:
        RunDirectoryError: this is no run, a file of it is damaged, or `out` cannot be written.
    """
    run = RunDirectory.existing(run_dir)
    data = collect(run, limits or Limits())
    # Cut the template once rather than replace twice: a run's own text is never searched for placeholders.
    head, _, rest = TEMPLATE.read_text("utf-8").partition("__TITLE__")
    middle, _, tail = rest.partition("__DATA__")
    page = "".join((head, html.escape(f"{data['run']['name']} · Miles"), middle, _embedded(data), tail))
    return publish(run.path / "report.html" if out is None else out, page)


def collect(run: RunDirectory, limits: Limits) -> dict[str, object]:
    """Everything that the page shows, as plain values."""
    history = _History()
    if run.events.is_file():
        for event in read(run.events):
            _take(history, event)
    notes: list[str] = []
    samples = _samples(run, history, limits, notes)
    left = len(history.log) - limits.messages
    if left > 0:
        notes.append(f"{left:,} older messages and checkpoints are left out.")
        first = [entry for entry in history.log[:left] if entry["kind"] in ("run_start", "run_end", "restart")]
        history.log = first + history.log[left:]
    return {
        "run": _summary(run, history),
        "curves": {name: _curve(by_rollout, limits.points) for name, by_rollout in sorted(history.curves.items())},
        "evals": _main_evals(history.curves),
        "stages": _stage_rows(history),
        "drops": history.drops.most_common(),
        "log": [{**entry, "text": _short(entry["text"], limits.characters)} for entry in history.log],
        "syncs": _syncs(history.syncs),
        "plan": run.plan_text.read_text("utf-8", "replace") if run.plan_text.is_file() else "",
        "samples": samples,
        "notes": notes,
    }


# ------------------------------------------------------------------------------------------------------------ events


def _take(history: _History, event: dict) -> None:
    """Add one event. Kinds that the page does not know are passed over: plugins may write their own."""
    kind, at, history.last_time = event["event"], event["rollout_id"], event["time"]
    if kind in ("metrics", "eval"):
        for name, value in event["metrics"].items():
            history.curves.setdefault(name, {}).setdefault(at or 0, []).append(value)
        if kind == "metrics":
            history.done = max(history.done, (at or 0) + 1)
            _take_times(history.stages.setdefault(at or 0, {}), event["metrics"])
    elif kind == "drop":
        history.drops[str(event.get("reason"))] += event.get("count") or 1
    elif kind == "weight_sync":
        history.syncs.append(event)
    elif kind in ("run_start", "run_end", "checkpoint", "message", "restart", "engine_recovered"):
        if kind == "run_start":
            history.starts.append(event)
            history.end = None
        elif kind == "run_end":
            history.end = event
        history.log.append(_entry(event))


def _take_times(took: dict[str, float], metrics: dict[str, float | None]) -> None:
    """Add a rollout's seconds; "step" is the whole of it, where the run says so."""
    seconds = stage_seconds(metrics)
    if metrics.get("perf/step_time"):
        seconds["step"] = metrics["perf/step_time"]
    for stage, value in seconds.items():
        took[stage] = took.get(stage, 0.0) + value


def _entry(event: dict) -> dict[str, object]:
    """One line of the page's log."""
    kind, level = event["event"], "info"
    if kind == "run_start":
        at = event.get("resumed_from")
        text = f"start {event.get('start', 1)}" + ("" if at is None else f", resumed at rollout {at}")
    elif kind == "run_end":
        level = "info" if event.get("status") == "completed" else "error"
        text = str(event.get("status")) + (f": {event['error']}" if event.get("error") else "")
    elif kind == "checkpoint":
        text = f"{event.get('path')} ({event.get('seconds') or 0:.2f} s)"
    elif kind == "restart":
        level, text = "warning", told_restart(event)
    elif kind == "engine_recovered":
        level, text = "warning", f"a restarted engine has weight version {event.get('version')}"
    else:
        level, text = str(event.get("level", "info")), str(event.get("text", ""))
    return {"time": event["time"], "kind": kind, "level": level, "text": text, "rollout": event["rollout_id"]}


def _summary(run: RunDirectory, history: _History) -> dict[str, object]:
    """The head of the page."""
    first, last = (history.starts[0], history.starts[-1]) if history.starts else ({}, {})
    if history.end is not None:
        status = str(history.end.get("status"))
    elif run.holder() is not None:
        status = "running"
    else:
        status = "interrupted" if history.starts else "not started"
    return {
        "name": run.path.resolve().name,
        "status": status,
        "error": (history.end or {}).get("error"),
        "plan_hash": last.get("plan_hash"),
        "versions": last.get("versions") or {},
        "began": first.get("time"),
        "ended": history.end["time"] if history.end else None,
        "last": history.last_time,
        "written": time.time(),
        "starts": [{"time": s["time"], "from": s.get("resumed_from") or 0} for s in history.starts],
        "done": history.done,
        "total": last.get("rollouts"),
    }


def _curve(by_rollout: dict[int, list[float | None]], points: int) -> dict[str, list]:
    """One metric against rollouts; several values of one rollout are spread within it."""
    xs = [round(at + i / len(values), 4) for at, values in sorted(by_rollout.items()) for i in range(len(values))]
    ys = [value for _, values in sorted(by_rollout.items()) for value in values]
    keep = _spread(range(len(xs)), points)
    return {"x": [xs[i] for i in keep],
            "y": [float(f"{ys[i]:.6g}") if isinstance(ys[i], (int, float)) else None for i in keep]}


def _main_evals(names: Iterable[str]) -> list[str]:
    """The score of each eval dataset, eval/NAME, without what is said beside it: eval/NAME-truncated_ratio and such."""
    scores = [name for name in names if name.count("/") == 1 and name.startswith("eval/")
              and name.partition("/")[2] not in ("step", "lag_steps", "duration_seconds", "export_time_seconds")
              and not name.startswith("eval/skipped_")]
    return [name for name in scores if not any(name.startswith(f"{other}-") for other in scores)]


def _stage_rows(history: _History) -> dict[str, object]:
    """Seconds per stage and rollout; "other" is what a step took beyond its stages, 0 where stages overlap."""
    xs = sorted(at for at, took in history.stages.items() if took)
    rows = {stage: [round(history.stages[at].get(stage, 0.0), 4) for at in xs] for stage in STAGES}
    rows["other"] = [round(max(0.0, history.stages[at].get("step", 0.0)
                               - sum(history.stages[at].get(stage, 0.0) for stage in STAGES)), 4) for at in xs]
    return {"x": xs, "rows": {stage: row for stage, row in rows.items() if any(row)}}


def _syncs(syncs: Sequence[dict]) -> dict[str, object] | None:
    if not syncs:
        return None
    return {"count": len(syncs), "version": syncs[-1].get("version"), "bytes": syncs[-1].get("bytes"),
            "tensors": syncs[-1].get("tensors"), "seconds": sum(s.get("seconds") or 0 for s in syncs) / len(syncs)}


# ----------------------------------------------------------------------------------------------------------- samples


def _samples(run: RunDirectory, history: _History, limits: Limits, notes: list[str]) -> list[dict]:
    """The files that go into the page, each with as many whole groups as its share of the limits allows."""
    files = [item for item in list_samples(run) if not _superseded(*item, history)]
    names = list(dict.fromkeys(name for name, _, _ in files))
    evals = sum(name != "rollout" for name in names)
    chosen = []
    for name in names:
        count = limits.rollouts if name == "rollout" else max(2, limits.evals // evals)
        chosen += _spread([item for item in files if item[0] == name], count)
    embedded = [_file(item, limits, len(chosen)) for item in chosen]
    if len(chosen) < len(files):
        notes.append(f"{len(chosen)} of {len(files)} recorded rollouts and evaluations are in this page.")
    kept = sum(len(file["samples"]) for file in embedded)
    total = kept + sum(file["samples_left"] for file in embedded)
    if kept < total:
        notes.append(f"{kept:,} of the {total:,} samples in the files shown fit, in whole groups where possible.")
    if any(file["recorded"] < file["groups"] for file in embedded):
        notes.append("The run recorded the first groups of each rollout only.")
    cut = sum("cut" in sample for file in embedded for sample in file["samples"])
    if cut:
        notes.append(f"{cut:,} responses are cut after {limits.tokens:,} tokens.")
    return embedded


def _superseded(name: str, rollout_id: int, path: Path, history: _History) -> bool:
    """Whether a later start does this rollout again and has not got there yet; an eval at its first one stands."""
    written = path.stat().st_mtime
    return any((start.get("resumed_from") or 0) < rollout_id + (name == "rollout") and written < start["time"] - 2
               for start in history.starts[1:])


def _file(item: tuple[str, int, Path], limits: Limits, files: int) -> dict[str, object]:
    """One file's groups from the first on, until its share of samples or bytes is used up; at least one sample."""
    name, rollout_id, path = item
    share, room = max(1, limits.samples // files), limits.megabytes * 1e6 / files
    kept, left, seen, total, full = [], 0, set(), 0, False
    for sample in read_samples(path):
        new = sample["prompt_uid"] not in seen
        seen.add(sample["prompt_uid"])
        total = sample.get("groups") or 0
        # A group that was begun is finished, up to twice the share: groups are what one compares.
        if full or (kept and (room <= 0 or len(kept) >= (share if new else 2 * share))):
            full, left = True, left + 1
            continue
        compact = _compact(sample, limits)
        room -= len(json.dumps(compact, ensure_ascii=False))
        kept.append(compact)
    return {"name": name, "rollout": rollout_id, "samples": kept, "samples_left": left,
            "recorded": len(seen), "groups": max(total, len(seen))}


def _compact(sample: dict, limits: Limits) -> dict[str, object]:
    """A sample as the page wants it: long ones cut, constant columns as one value."""
    pieces, ids = sample.get("pieces") or [], sample.get("token_ids") or []
    cut = len(pieces) - limits.tokens
    compact = {
        "uid": sample["prompt_uid"], "row": sample.get("row"), "i": sample.get("index"), "n": len(ids),
        "prompt": _short(sample.get("prompt") or "", limits.characters),
        "pieces": pieces[:limits.tokens], "ids": ids[:limits.tokens],
        "lp": [None if p is None else round(p, 3) for p in (sample.get("log_probs") or [])[:limits.tokens]],
        "mask": _constant((sample.get("loss_mask") or [])[:limits.tokens]),
        "ver": _constant((sample.get("versions") or [])[:limits.tokens]),
        "reward": sample.get("reward"), "rewards": sample.get("rewards") or {}, "adv": sample.get("advantage"),
        "label": sample.get("label"), "status": sample.get("status"),
    }
    if not pieces:
        compact["text"] = _short(sample.get("response") or "", limits.characters)
    if cut > 0:
        compact["cut"] = cut
    return compact


def _constant(values: list) -> object:
    return values[0] if values and all(value == values[0] for value in values) else values


def _short(text: str, characters: int) -> str:
    return text if len(text) <= characters else f"{text[:characters]} … ({len(text) - characters:,} more characters)"


def _spread(items: Sequence, count: int) -> list:
    """At most `count` of the items, evenly spread, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    if count < 2:
        return [items[-1]]
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def _embedded(data: object) -> str:
    """JSON that can stand in a script element: no markup, no address that a scanner would take for a reference."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    for char, escape in (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026"), ("//", "/\\/"), ("\u2028", "\\u2028"),
                         ("\u2029", "\\u2029")):
        text = text.replace(char, escape)
    return text
