"""One line an event, torn at worst at the end, and a reader that tells what survived."""

import json
import math
import os
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miles_core.errors import RunDirectoryError
from miles_core.record import events
from miles_core.record.events import EventLog, Kind, read, stage_seconds

JSON = st.recursive(st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))


def log_of_three(path: Path) -> EventLog:
    log = EventLog(path, clock=lambda: 1.5)
    log.run_start("hash", {"torch": "2"}, rollouts=3)
    log.append("metrics", 0, metrics={"train/loss": 0.5})
    log.append("message", level="info", text="ünï\u2028code\nof two lines")
    return log


def test_a_line_is_strict_json_with_the_three_keys(tmp_path):
    log_of_three(tmp_path / "e").run_end("failed", ValueError("x"))
    lines = (tmp_path / "e").read_bytes().splitlines()
    parsed = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert [event["event"] for event in parsed] == ["run_start", "metrics", "message", "run_end"]
    assert parsed[0] == {"event": "run_start", "time": 1.5, "rollout_id": None, "start": 1, "plan_hash": "hash",
                         "versions": {"torch": "2"}, "resumed_from": None, "rollouts": 3}
    assert parsed[3]["error"] == "x"


def test_every_kind_of_the_core(tmp_path):
    log = log_of_three(tmp_path / "e")
    log.append("eval", 0, metrics={"eval/a": 1})
    log.append("weight_sync", 0, version=1, seconds=0.1, tensors=2, bytes=300)
    log.append("drop", 0, reason="stale", count=3, lag=2)
    log.append("checkpoint", 0, path=str(tmp_path), seconds=0.2)
    log.append("plugin_kind", 0, anything=Path("x"))
    kinds = [event["event"] for event in read(tmp_path / "e")]
    assert kinds[3:] == ["eval", "weight_sync", "drop", "checkpoint", "plugin_kind"]
    with pytest.raises(ValueError, match="time"):
        log.append("x", time=3)
    log.close()
    with pytest.raises(ValueError, match="closed"):
        log.append("message", level="info", text="late")


def test_what_is_not_finite_is_null_and_named(tmp_path):
    log = EventLog(tmp_path / "e")
    log.append("metrics", 1, metrics={"a": math.nan, "b": np.float32("inf"), "c": np.float32(2)}, seconds=-math.inf,
               deep={"x": [1.0, math.nan]}, array=np.arange(2))
    (event,) = read(tmp_path / "e")
    assert event["metrics"] == {"a": None, "b": None, "c": 2.0} and event["seconds"] is None
    assert event["nonfinite"] == ["a", "b", "seconds", "x.1"] and event["array"] == [0, 1]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(JSON, min_size=1, max_size=4), st.data())
def test_any_prefix_reads_and_loses_only_the_torn_line(tmp_path, values, data):
    path = tmp_path / "e"
    path.unlink(missing_ok=True)
    log = EventLog(path, clock=lambda: 1.5)  # a fixed width, so that hypothesis may replay cuts
    for value in values:
        log.append("message", value=value)
    log.close()
    whole, expected = path.read_bytes(), list(read(path))
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    complete = whole[:cut].count(b"\n")
    assert list(read(path)) == expected[:complete]
    EventLog(path).append("message", value="next")  # opening mends the file
    assert [event["value"] for event in read(path)] == [event["value"] for event in expected[:complete]] + ["next"]


def test_every_prefix_of_one_file(tmp_path):
    log_of_three(tmp_path / "e").close()
    whole = (tmp_path / "e").read_bytes()
    for cut in range(len(whole) + 1):
        (tmp_path / "cut").write_bytes(whole[:cut])
        assert len(list(read(tmp_path / "cut"))) == whole[:cut].count(b"\n")


def test_a_torn_line_longer_than_a_block_is_cut(tmp_path):
    log_of_three(tmp_path / "e").close()
    whole = (tmp_path / "e").read_bytes()
    (tmp_path / "e").write_bytes(whole + b"x" * 200_000)
    assert EventLog(tmp_path / "e").starts == 1
    assert (tmp_path / "e").read_bytes() == whole


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path):
    log_of_three(tmp_path / "e").close()
    for junk in (b"{oops\n", b"[]\n", b'{"event": "x"}\n'):
        (tmp_path / "bad").write_bytes(junk + (tmp_path / "e").read_bytes())
        with pytest.raises(RunDirectoryError, match="line 1 is damaged"):
            list(read(tmp_path / "bad"))


def test_a_full_disk_leaves_whole_lines(tmp_path, monkeypatch):
    log = log_of_three(tmp_path / "e")
    before, write = (tmp_path / "e").read_bytes(), os.write
    calls = []

    def half(file, data):
        calls.append(data)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return write(file, data[:10])

    monkeypatch.setattr(events.os, "write", half)
    with pytest.raises(RunDirectoryError, match="disk is full"):
        log.append("metrics", 1, metrics={"a": 1})
    assert (tmp_path / "e").read_bytes() == before


def test_threads_do_not_mix_lines(tmp_path):
    log = EventLog(tmp_path / "e")
    threads = [threading.Thread(target=lambda n=n: [log.append("drop", n, reason="x" * 500) for _ in range(50)])
               for n in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert sum(event["event"] == "drop" for event in read(tmp_path / "e")) == 200


def write_starts(path: Path, *starts: tuple[int | None, int]) -> None:
    for first, stop in starts:
        log = EventLog(path)
        log.run_start("h", {}, resumed_from=first)
        for rollout_id in range(first or 0, stop):
            log.append("metrics", rollout_id, metrics={"start": log.starts})
        log.close()


def lineage(path: Path, **how) -> list[tuple[int, int]]:
    return [(event["rollout_id"], event["metrics"]["start"]) for event in read(path, **how)
            if event["event"] == "metrics"]


def test_a_resume_supersedes_what_it_does_again(tmp_path):
    write_starts(tmp_path / "e", (None, 5), (3, 6), (4, 5))
    assert lineage(tmp_path / "e") == [(0, 1), (1, 1), (2, 1), (3, 2), (4, 3)]
    assert len(lineage(tmp_path / "e", everything=True)) == 5 + 3 + 1
    assert lineage(tmp_path / "e", only=(b'"eval"',)) == [], "what is asked for alone is parsed"
    assert lineage(tmp_path / "e", only=(b'"metrics"',)) == lineage(tmp_path / "e")
    assert [e["start"] for e in read(tmp_path / "e") if e["event"] == "run_start"] == [1, 2, 3]


def test_an_early_resume_supersedes_later_ones_and_scratch_supersedes_all(tmp_path):
    write_starts(tmp_path / "e", (None, 5), (4, 8), (2, 3))
    assert lineage(tmp_path / "e") == [(0, 1), (1, 1), (2, 3)]
    write_starts(tmp_path / "e", (None, 1))
    assert lineage(tmp_path / "e") == [(0, 4)]


def test_an_eval_of_the_checkpoint_survives_unless_done_again(tmp_path):
    log = EventLog(tmp_path / "e")
    log.run_start("h", {})
    for done in (0, 2, 4):
        log.append("eval", done, metrics={"eval/a": 1})
    log.run_start("h", {}, resumed_from=2)
    evals = lambda: [(e["rollout_id"], e["metrics"]["eval/a"]) for e in read(tmp_path / "e") if e["event"] == "eval"]  # noqa: E731
    assert evals() == [(0, 1), (2, 1)]
    log.append("eval", 2, metrics={"eval/a": 2})
    assert evals() == [(0, 1), (2, 2)]
    log.run_start("h", {})
    assert evals() == []


def test_stage_seconds_counts_nothing_twice():
    perf = {"perf/rollout_time": 2.0, "perf/train_time": 5.0, "perf/log_probs_time": 1.0, "perf/step_time": 9.0,
            "perf/ref_log_probs_time": 0.5, "perf/update_weights_time": 0.1, "rollout/x": 3.0, "perf/eval_time": None}
    assert stage_seconds(perf) == {"rollout": 2.0, "score": 1.5, "train": 3.5, "sync": 0.1}
    assert stage_seconds({**perf, "perf/actor_train_time": 3.0})["train"] == 3.0


def test_every_kind_that_is_written_is_declared():
    """Readers, the doctor among them, ask for kinds by `Kind`."""
    root = Path(__file__).parents[3]
    written = {kind for path in (*root.glob("miles_core/**/*.py"), *root.glob("plugins/*/src/**/*.py"))
               for kind in re.findall(r'\bevent\(\s*"(\w+)"', path.read_text(encoding="utf-8"))}
    assert {"heartbeat", "engine_lost", "request_failed"} <= written <= {*Kind}, written - {*Kind}
