"""What the page draws: the same however the file was read, what read() leaves out left out, and bounded."""

import json
import math
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from miles_report.page.document import Limits, addition, document, status_of
from miles_report.page.follow import Follower
from miles_report.page.history import History, Series

from miles_core.errors import RunDirectoryError
from miles_core.record.directory import RunDirectory
from miles_core.record.events import EventLog, read
from miles_core.record.samples import sample_file

LIMITS = Limits(points=10_000, bars=10_000)
ROLLOUTS = st.integers(0, 3)
NUMBER = st.integers(-3, 3).map(float) | st.none()


def _event(kind, rollouts=None, **fields):
    return st.fixed_dictionaries({"event": st.just(kind), "time": st.integers(0, 99),
                                  "rollout_id": st.none() if rollouts is None else rollouts, **fields})


EVENTS = st.lists(st.one_of(
    _event("run_start", resumed_from=st.none() | ROLLOUTS, rollouts=st.just(6), start=st.just(1)),
    _event("metrics", ROLLOUTS, metrics=st.dictionaries(
        st.sampled_from(["train/loss", "perf/rollout_time", "perf/step_time"]), NUMBER)),
    _event("metrics", ROLLOUTS, metrics=st.just({"train/loss": 1.0, "perf/step_time": 2.0})),
    _event("eval", ROLLOUTS, metrics=st.dictionaries(st.sampled_from(["eval/a", "eval/b"]), NUMBER, min_size=1)),
    _event("drop", st.none() | ROLLOUTS, reason=st.sampled_from(["stale", "long"]), count=st.integers(1, 3)),
    _event("weight_sync", st.none() | ROLLOUTS, version=ROLLOUTS, seconds=st.just(0.5)),
    _event("heartbeat", st.none() | ROLLOUTS, sampling=ROLLOUTS, finished=ROLLOUTS, capacity=ROLLOUTS),
    _event("message", st.none() | ROLLOUTS, level=st.just("info"), text=st.text(max_size=3)),
    _event("checkpoint", ROLLOUTS, path=st.just("c"), seconds=st.just(0.1)),
    _event("engine_lost", engine=st.just("engine 0"), why=st.just("gone"), text=st.just("told")),
    _event("engine_restarted", engine=st.just("engine 0"), restarts=st.just(1), text=st.just("told")),
    _event("router_lost", why=st.just("gone"), text=st.just("told")),
    _event("request_failed", request=st.just("r"), attempt=st.just(1), why=st.just("gone"), text=st.just("told")),
    _event("of a plugin", ROLLOUTS),
    _event("run_end", status=st.just("completed"), error=st.none()),
), min_size=3, max_size=30)
TOLD = ("run_start", "run_end", "message", "checkpoint", "engine_lost", "engine_restarted", "router_lost",
        "request_failed")
QUICK = settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])


def encoded(events):
    return "".join(json.dumps(event, ensure_ascii=False) + "\n" for event in events).encode()


def shown(run, history, part=None):
    """The document without the moment at which it was made."""
    status = status_of(run, history, was_held=False)
    data = document(run, history, LIMITS, status) if part is None else addition(run, history, part, LIMITS, status)
    data["run"].pop("written")
    return data


def added(have, more):
    """What live.js does."""
    sets = {name: {**have[name]} for name in ("curves", "queue")}
    for name, curves in sets.items():
        for metric, new in more[name].items():
            old = curves.get(metric, {"x": [], "y": []})
            order = sorted(zip(old["x"] + new["x"], old["y"] + new["y"]), key=lambda point: point[0])
            curves[metric] = {"x": [x for x, _ in order], "y": [y for _, y in order]}
    return {**have, **more, **sets, "stages": have["stages"] + more["stages"], "log": have["log"] + more["log"]}


@QUICK
@given(EVENTS, st.data())
def test_a_file_that_grows_gives_what_the_whole_file_gives(tmp_path, events, data):
    text, path = encoded(events), tmp_path / "events.jsonl"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    path.unlink(missing_ok=True)
    run, follower = RunDirectory(tmp_path), Follower(path)
    page, place = shown(run, follower.advance()), (follower.lineage, follower.offset)
    for cut in (*cuts, len(text)):
        path.write_bytes(text[:cut])
        history = follower.advance()
        new = follower.since(place[1], 1 << 20) if place[0] == follower.lineage else None
        if new is None:
            page = shown(run, history)
        else:
            later = History()
            for event in new:
                later.take(event)
            page = added(page, shown(run, history, later))
        place = follower.lineage, follower.offset
    whole = shown(run, Follower(path).advance())
    page.pop("part", None)
    bars, page["stages"] = page["stages"], whole["stages"]
    assert page == whole
    assert follower.offset == len(text)
    for stage in {stage for bar in whole["stages"] for stage in bar["took"]} - {"other"}:  # a rollout may come in parts
        for part, full in ((bars, whole["stages"]), (whole["stages"], bars)):
            assert sum(bar["took"].get(stage, 0) for bar in part) == pytest.approx(
                sum(bar["took"].get(stage, 0) for bar in full))


@QUICK
@given(EVENTS)
def test_superseded_events_are_those_that_read_leaves_out(tmp_path, events):
    path = tmp_path / "events.jsonl"
    path.write_bytes(encoded(events))
    history, survivors = Follower(path).advance(), list(read(path))

    def of(kind):
        return [event for event in survivors if event["event"] == kind]

    curves: dict[str, list] = {}
    for event in survivors:
        for name, value in event["metrics"].items() if event["event"] in ("metrics", "eval") else ():
            curves.setdefault(name, []).append((event["rollout_id"], value))
    assert curves == {name: [(x, None if math.isnan(y) else y) for x, y in zip(series.x, series.y, strict=True)]
                      for name, series in (history.curves | history.evals).items()}
    assert history.done == max((event["rollout_id"] + 1 for event in of("metrics")), default=0)
    assert history.beats == of("heartbeat") and history.syncs == of("weight_sync") and history.starts == of("run_start")
    assert history.drops.total() == sum(event["count"] for event in of("drop"))
    told = [event for event in survivors if event["event"] in TOLD]
    assert [(entry["kind"], entry["rollout"]) for entry in history.log] == [(e["event"], e["rollout_id"]) for e in told]


def test_a_file_of_another_run_is_begun_anew(tmp_path):
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.append("metrics", 0, metrics={"train/loss": 1.0})
    follower = Follower(path)
    first, lineage = follower.advance(), follower.lineage
    assert first.done == 1
    path.unlink()
    assert follower.advance().done == 0 and follower.lineage != lineage
    time.sleep(0.002)
    log = EventLog(path)
    for rollout_id in range(3):
        log.append("metrics", rollout_id, metrics={"train/loss": 2.0})
    assert list(follower.advance().curves["train/loss"].y) == [2.0, 2.0, 2.0]
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[1])
    assert list(follower.advance().curves["train/loss"].x) == [1.0], "it has become shorter"
    path.write_bytes(b"".join(lines[2:] + lines[:2]))
    assert list(follower.advance().curves["train/loss"].x) == [2.0, 0.0, 1.0], "it is another, and longer"


def test_a_torn_line_is_waited_for_and_a_damaged_one_is_named(tmp_path):
    path = tmp_path / "events.jsonl"
    line = b'{"event":"metrics","time":1,"rollout_id":0,"metrics":{"a":1}}\n'
    path.write_bytes(line + line[:20])
    follower = Follower(path)
    assert follower.advance().done == 1 and follower.offset == len(line)
    path.write_bytes(line + b"[]\n" + line.replace(b"0", b"1"))
    for _ in range(2):
        with pytest.raises(RunDirectoryError, match="line 2 is damaged"):
            follower.advance()
    path.write_bytes(line + line.replace(b"0", b"1"))
    assert follower.advance().done == 2


def test_a_place_that_starts_no_line_or_is_far_gives_nothing(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    for rollout_id in range(5):
        log.append("metrics", rollout_id, metrics={"train/loss": 1.0})
    follower = Follower(log.path)
    follower.advance()
    assert len(follower.since(0, 1 << 20)) == 5 and follower.since(follower.offset, 0) == []
    assert follower.since(7, 1 << 20) is None and follower.since(0, 10) is None
    assert follower.since(follower.offset + 1, 1 << 20) is None and follower.since(-1, 1 << 20) is None


def test_a_long_curve_keeps_its_extremes_and_what_is_not_finite(tmp_path):
    history = History()
    series = history.curves["train/grad_norm"] = Series()
    for at in range(30_000):
        series.add(at, {12_345: 1e6, 20_001: -7.0, 25_000: None}.get(at, math.sin(at)))
    curve = document(RunDirectory(tmp_path), history, Limits(points=400), "running")["curves"]["train/grad_norm"]
    points = dict(zip(curve["x"], curve["y"], strict=True))
    assert len(points) <= 610 and curve["x"] == sorted(curve["x"])
    assert (points[12_345], points[20_001], points[25_000]) == (1e6, -7.0, None)
    assert 0 in points and 29_999 in points


def test_neighbouring_rollouts_are_averaged_in_the_bars(tmp_path):
    history = History()
    for at in range(100):
        took = {"perf/rollout_time": 1.0, "perf/step_time": 3.0, "perf/log_probs_time": float(at % 10 == 9)}
        history.take({"event": "metrics", "time": at, "rollout_id": at, "metrics": took})
    bars = document(RunDirectory(tmp_path), history, Limits(bars=10), "running")["stages"]
    assert len(bars) == 10 and (bars[3]["from"], bars[3]["to"], bars[3]["n"]) == (30, 39, 10)
    assert all(bar["took"] == {"rollout": 1.0, "score": 0.1, "other": 1.9} for bar in bars)


def test_engines_go_down_and_come_back():
    history = History()

    def tell(kind, **fields):
        history.take({"event": kind, "time": 1.0, "rollout_id": None, **fields})

    tell("run_start")
    tell("engine_lost", engine="engine 1", why="signal 9")
    assert history.engines["engine 1"].items() >= {"state": "lost", "losses": 1, "why": "signal 9"}.items()
    tell("weight_sync", version=3)
    assert history.engines["engine 1"]["state"] == "lost"
    tell("engine_restarted", engine="engine 1", restarts=1)
    tell("engine_recovered", version=3)
    assert (history.engines["engine 1"]["state"], history.engines["engine 1"]["version"]) == ("serving", 3)
    tell("run_start", resumed_from=2)
    assert history.engines == {}, "another start has other servers"


def test_the_pace_and_the_time_of_several_starts():
    history = History()
    for at, event in enumerate([{"event": "run_start"}, *[{"event": "metrics", "rollout_id": n, "metrics": {}}
                                                          for n in range(3)]]):
        history.take({"rollout_id": None, "time": 10.0 * at, **event})
    assert (history.pace, history.before, history.done) == (10.0, 0.0, 3)
    history.take({"event": "message", "rollout_id": None, "time": 990.0, "level": "info", "text": "engine local"})
    history.take({"event": "run_start", "rollout_id": None, "time": 1000.0, "resumed_from": 2})
    assert (history.pace, history.before, history.done) == (None, 30.0, 2)
    history.take({"event": "metrics", "rollout_id": 2, "time": 400.0, "metrics": {}})
    assert history.pace is None, "the clock was set back"


def test_an_evaluation_of_the_weights_it_resumed_from_counts_until_it_is_done_again(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    follower = Follower(log.path)

    def evals():
        return {name: list(series.y) for name, series in follower.advance().evals.items()}

    log.run_start("0", {})
    log.append("eval", 3, metrics={"eval/a": 0.1})
    log.append("eval", 3, metrics={"eval/b": 0.2})
    log.append("eval", 6, metrics={"eval/a": 0.3})
    log.run_start("0", {}, resumed_from=3)
    assert evals() == {"eval/a": [0.1], "eval/b": [0.2]}
    before = follower.lineage
    log.append("eval", 3, metrics={"eval/a": 0.5})
    assert evals() == {"eval/a": [0.5]} and follower.lineage != before
    log.append("eval", 3, metrics={"eval/b": 0.6})
    assert evals() == {"eval/a": [0.5], "eval/b": [0.6]}


def test_a_dataset_whose_name_begins_like_that_of_another_has_its_score(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.run_start("0", {})
    for name in ("math", "math-500", "b"):
        log.append("eval", 2 * (name == "b"), metrics={f"eval/{name}": 0.5, f"eval/{name}-pass@2": 0.6,
                                                       f"eval/{name}-truncated_ratio": 0.0})
    follower, run = Follower(log.path), RunDirectory(tmp_path)
    assert document(run, follower.advance(), LIMITS, "")["evals"] == ["eval/b", "eval/math", "eval/math-500"]
    log.run_start("0", {}, resumed_from=1)
    assert document(run, follower.advance(), LIMITS, "")["evals"] == ["eval/math", "eval/math-500"]


def test_any_name_of_a_metric_is_shown(tmp_path):
    history = History()
    names = ["perf/hooks/a", "perf/hooks/a/b/c", "perf/hook_calls/a/b/c", "perf/", "eval/", "/", ""]
    history.take({"event": "metrics", "time": 1, "rollout_id": 0, "metrics": dict.fromkeys(names, 2.0)})
    data = document(RunDirectory(tmp_path), history, LIMITS, "running")
    assert {*data["curves"]} == {*names}
    assert {(row["plugin"], row["hook"], row["calls"]) for row in data["hooks"]} == {("a", "", 0), ("a", "b/c", 2)}


def test_sample_files_come_in_order_whatever_their_datasets_are_called(tmp_path):
    from miles_report.page.samples import list_samples

    (tmp_path / "samples").mkdir()
    for name, rollout_id in (("eval_b/c d", 1), ("rollout", 12), ("eval_a_000001", 0), ("rollout", 2)):
        sample_file(tmp_path, name, rollout_id).touch()
    (tmp_path / "samples" / "notes.txt").write_text("mine")
    assert [(name, n) for name, n, _ in list_samples(tmp_path)] == [
        ("rollout", 2), ("rollout", 12), ("eval_a_000001", 0), ("eval_b/c d", 1)]


@pytest.mark.parametrize(("resumed", "left"), [(None, []), (0, [("eval_a", 0)]), (1, [("eval_a", 0), ("rollout", 0)])])
def test_nothing_of_an_earlier_run_in_the_folder_is_shown(tmp_path, resumed, left):
    """Its evaluation of the weights that a resume begins with is; a start from scratch has others."""
    from miles_report.page.samples import surviving

    history, files = History(), [("eval_a", 0, tmp_path / "e"), ("rollout", 0, tmp_path / "r")]
    for _, _, path in files:
        path.touch()
    begun = path.stat().st_mtime
    for at, first in ((begun - 10, None), (begun + 10, resumed)):
        history.take({"event": "run_start", "rollout_id": None, "time": at, "resumed_from": first})
    assert [(name, n) for name, n, _ in surviving(files, history)] == left
