"""Rules of the rollout side: the engines and their servers, and the worker that keeps them busy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from miles_core.record.events import Kind
from miles_report.doctor.finding import Finding
from miles_report.doctor.record import Cause, Record

SILENT = 3
"""Heartbeats that may be missing before the worker counts as dead."""

def engine_restarts(run: Record) -> Iterator[Finding]:
    """Servers that die, again and again."""
    lost = defaultdict(list)
    for event in run.of(Kind.ENGINE_LOST, Kind.ROUTER_LOST):
        lost[str(event.get("engine") or "the router")].append(event)
    last_word = run.cause is Cause.DEATH and "restarts" in run.error
    for name, events in lost.items():
        yield Finding(
            "error" if last_word and name in run.error else "warning" if len(events) > 1 else "note",
            f"{name} was lost {len(events)} time{'s' if len(events) > 1 else ''}; last: {events[-1].get('why')}",
            "each time its requests are sampled again and its weights sent again"
            + ("; the run ended when it may not restart once more" if last_word and name in run.error else ""),
            f"read the end of {_log(name)}; the limit is --max-engine-restarts", run.where(events[-1]))


def requests_fail(run: Record) -> Iterator[Finding]:
    """Requests that have to be sent again."""
    failed = run.of(Kind.REQUEST_FAILED)
    if len(failed) > max(10, 2 * len(run.metrics)):
        yield Finding("warning", f"{len(failed)} requests failed and were sent again; last: {failed[-1].get('why')}",
                      "the time that they took is lost, and an engine or the router is ill",
                      "read logs/engine-*.log and logs/router.log; a limit that is too short is --rollout-timeout",
                      run.where(failed[-1]))


def silent_worker(run: Record) -> Iterator[Finding]:
    """An asynchronous run whose worker gives no sign of life, or samples without finishing anything."""
    beats = run.of(Kind.HEARTBEAT)
    begins = [event for event in run.of(Kind.MESSAGE) if "rollout worker started" in str(event.get("text"))]
    every = float(run.option("heartbeat_interval", 30.0))
    if not every or not (beats or begins):
        return
    last = (beats or begins)[-1]
    age = run.now - last["time"]
    if run.holder is not None and run.end is None and age > SILENT * every:
        yield Finding("error", f"the run goes on, and its worker's last sign of life is {age:.0f} s old",
                      f"it reports every {every:g} s that it is alive: it hangs, or its process is stopped",
                      "look at the end of logs/run.log and of logs/engine-*.log; py-spy dump --pid "
                      f"{run.holder.get('pid')} shows where it is", run.where(last))
    starts = {event["line"] for event in run.of(Kind.RUN_START, Kind.RUN_END)}
    for one, next_ in zip(beats, beats[1:], strict=False):
        gap, same = next_["time"] - one["time"], not any(one["line"] < line < next_["line"] for line in starts)
        if same and gap > SILENT * every:
            yield Finding("warning", f"no sign of life of the worker for {gap:.0f} s",
                          "nothing is sampled while it stands still: a call blocks it, or the machine is overloaded",
                          "see logs/run.log around that time; a scorer that blocks belongs in a thread",
                          run.where(next_))
            break
    idle, bound = beats[-1].get("idle_s") if beats else None, float(run.option("rollout_timeout") or 600.0)
    if idle is not None and idle > bound and beats[-1].get("sampling") and run.end is None:
        yield Finding("warning", f"no group has finished for {idle:.0f} s, with {beats[-1]['sampling']} being sampled",
                      "unless an evaluation takes so long, the engine answers nothing",
                      "read logs/engine-*.log; see --rollout-timeout and --rollout-max-response-len",
                      run.where(beats[-1]))


def _log(engine: str) -> str:
    return f"logs/{engine.replace(' ', '-')}.log" if engine.startswith("engine ") else "logs/router.log"
