"""The view: stable plain lines, a panel on a terminal, and never a reason for a run to die."""

import io
import re

import pytest
import rich.console

from miles_core.record import console
from miles_core.record.console import Console, sparkline

METRICS = {"rollout/raw_reward": 0.431, "rollout/response_len/mean": 6.8, "train/loss": 0.0123, "train/grad_norm": 0.61,
           "train/pg_clipfrac": 0.00002, "perf/rollout_time": 0.35, "perf/train_time": 0.6,
           "perf/update_weights_time": 0.01, "perf/ref_log_probs_time": None}


class Clock:
    now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(console, "time", Clock())
    return console.time


def plain(clock, first=0):
    stream = io.StringIO()
    view = Console(live=False, stream=stream)
    view.start({"run": "demo", "model": "tiny"}, 60, first)
    return view, stream


def test_plain_lines(clock):
    view, stream = plain(clock)
    view.stage("rollout")
    clock.now += 2
    view.rollout(0, METRICS)
    view.evaluation("arith", 0, {"eval/arith": 0.5, "eval/arith-truncated_ratio": 0.25})
    view.message("info", "Loaded checkpoint from runs/a")
    view.message("detail", "for a log")
    view.message("warning", "careful")
    view.stop("completed")
    view.stop("completed")
    assert stream.getvalue().splitlines() == [
        "run demo  model tiny",
        "rollout 1/60  reward 0.431  len 6.8  loss 0.0123  grad 0.61  clipfrac 2.0e-05  "
        "rollout 0.35s train 0.60s sync 0.01s  eta 0:01:58",
        "eval arith  rollout 0  arith 0.500  arith-truncated_ratio 0.250",
        "Loaded checkpoint from runs/a",
        "warning: careful",
        "run demo completed  1/60 rollouts  0:00:02",
    ]


def test_the_eta_follows_the_last_rollouts_and_a_resume_counts_on(clock):
    view, stream = plain(clock, first=30)
    for rollout_id in range(30, 60):
        clock.now += 100 if rollout_id < 35 else 1
        view.rollout(rollout_id, {})
    lines = stream.getvalue().splitlines()
    assert lines[1] == "rollout 31/60  eta 0:48:20"
    assert lines[-2] == "rollout 59/60  eta 0:00:01" and lines[-1] == "rollout 60/60  eta 0:00:00"


def test_metrics_that_are_missing_null_or_not_finite_are_no_trouble(clock):
    view, stream = plain(clock)
    view.rollout(0, {"rollout/raw_reward": float("nan"), "train/loss": None})
    view.evaluation("x", 0, {})
    assert "reward nan" in stream.getvalue() and "loss" not in stream.getvalue()


def test_text_cannot_steer_the_terminal(clock):
    view, stream = plain(clock)
    view.message("info", "a\x1b[2Jb\rc")
    view.evaluation("set\x1b[2J", 0, {"eval/set\x1b[2J": 0.5, "eval/set\x1b[2J/reward/a\rb": 0.5})
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()


@pytest.mark.parametrize(("tty", "environment", "live"), [
    (True, {"TERM": "xterm"}, True), (False, {"TERM": "xterm"}, False), (True, {"TERM": "dumb"}, False),
    (True, {"TERM": "xterm", "CI": "true"}, False)])
def test_when_the_panel_is_used(monkeypatch, tty, environment, live):
    stream = io.StringIO()
    stream.isatty = lambda: tty
    for name in ("TERM", "CI"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    view = Console(stream=stream)
    view.start({"run": "demo"}, 1)
    assert (view._live is not None) is live
    view.stop("completed")
    assert view._live is None


@pytest.fixture
def live(monkeypatch):
    def made(width=110):
        terminal = rich.console.Console(record=True, force_terminal=True, width=width, height=40, file=io.StringIO())
        monkeypatch.setattr(rich.console, "Console", lambda **_: terminal)
        return Console(live=True), terminal

    return made


def test_the_panel_shows_the_run(live):
    view, terminal = live()
    view.start({"run": "demo", "model": "tiny"}, 20)
    view.stage("train")
    for rollout_id in range(12):
        view.rollout(rollout_id, {**METRICS, "rollout/raw_reward": rollout_id / 12})
    view.evaluation("arith", 10, {"eval/arith": 0.25})
    view.evaluation("arith", 11, {"eval/arith": 0.5})
    view.message("info", "Saved checkpoint to runs/demo/[bold]x")
    view.message("error", "[red]not markup")
    view.stop("completed")
    text = terminal.export_text()
    assert "model tiny" in text and "Saved checkpoint to runs/demo/[bold]x" in text and "[red]not markup" in text
    last = text[text.rindex("╭"):]
    for words in ("demo", "completed", "12/20", "reward 0.917", "len 6.8", "grad 0.61", "clipfrac", "eval arith 0.500",
                  "first 0.250", "rollout 0.35s", "train 0.60s", "━"):
        assert words in last, words
    assert re.search("[▁▂▃▄▅▆▇█]{12}", last)


def test_what_a_terminal_echoes_stands_below_the_panel(live):
    """In its last line, which is full, ^C wraps into another, and the border above is drawn twice."""
    view, terminal = live(width=80)
    view.start({"run": "demo"}, 20)
    view.stop("interrupted")
    assert terminal.export_text().endswith("╯\n\n")


def test_a_panel_of_80_columns_hides_no_figure(live):
    view, terminal = live(width=80)
    view.start({"run": "demo"}, 20)
    view.message("info", "words " * 20)
    for rollout_id in range(12):
        view.rollout(rollout_id, METRICS)
    for name in ("first", "second", "third"):
        view.evaluation(name, 10, {f"eval/{name}": 0.25})
    view.stop("completed")
    text = terminal.export_text()
    last = text[text.rindex("╭"):]
    assert {len(line) for line in last.splitlines()} <= {0, 80} and "…" not in last
    for word in ("clipfrac", "second", "third"):
        assert word in last, word
    assert text.split().count("words") == 20
    assert re.search(r"clipfrac \d", last)  # no line ends between a name and its figure


def test_a_narrow_panel(live):
    view, terminal = live(width=30)
    view.start({"run": "demo"}, 3)
    view.rollout(0, METRICS)
    view.stop("failed")
    text = terminal.export_text()
    last = text[text.rindex("╭"):].splitlines()
    assert {len(line) for line in last} <= {0, 30} and "failed" in last[1] and "1/3" in last[1]


def test_a_view_that_never_started_has_nothing_to_say():
    stream = io.StringIO()
    Console(live=False, stream=stream).stop("failed")
    assert stream.getvalue() == ""


class Closed(io.StringIO):
    def write(self, text):
        raise BrokenPipeError


def test_a_closed_pipe_ends_the_view_and_not_the_run(clock):
    view = Console(live=False, stream=Closed())
    view.start({"run": "demo"}, 3)
    view.rollout(0, METRICS)
    view.stop("completed")


def test_a_panel_that_fails_ends_the_view_and_not_the_run(live, monkeypatch):
    view, terminal = live()
    view.start({"run": "demo"}, 3)
    monkeypatch.setattr(view, "_panel", lambda: 1 / 0)
    view.rollout(0, METRICS)
    monkeypatch.setattr(terminal, "print", lambda *_, **__: 1 / 0)
    view.message("info", "x")
    view.rollout(1, object())
    view.stop("completed")
    assert view._live is None


def test_a_stream_that_knows_ascii_only():
    raw = io.BytesIO()
    view = Console(live=False, stream=io.TextIOWrapper(raw, encoding="ascii"))
    view.message("info", "réward ✓")
    assert raw.getvalue() == b"r?ward ?\n"


def test_sparkline():
    assert sparkline([0, 1], 8) == "▁█" and sparkline([], 8) == "" and sparkline([2, 2], 8) == "▁▁"
    assert sparkline(range(160), 8) == "▁▂▃▄▅▆▇█"
