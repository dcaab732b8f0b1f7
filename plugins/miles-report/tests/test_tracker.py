"""The outbox of trackers: what is handed over arrives in order, and a service that fails or hangs holds up nothing."""

import contextlib
import functools
import threading
import time

import pytest
from miles_report import tracker
from miles_report.tracker import COLUMNS, Outbox, SendError, rows_of, without_password
from miles_testing.sample_inputs import canned_samples

from miles_core.errors import ConfigError

PLAN = {"name": "demo", "digest": "d1", "options": {"rollout.num_rollout": 5, "board.api_key": "sesame-open-42"}}


class Board:
    """A service that keeps what it gets; `gate` holds it up, `refuses` makes it fail."""

    def __init__(self, refuses=()):
        self.got, self.gate, self.refuses, self.opened = [], threading.Event(), set(refuses), []
        self.refused = 0
        self.gate.set()

    def has_refused(self, count):
        """Wait until it has; what came of all but the last is known by then."""
        end = time.monotonic() + 20
        while self.refused < count:
            assert time.monotonic() < end
            time.sleep(0.005)

    def _take(self, *entry):
        self.gate.wait(20)
        if entry[0] in self.refuses:
            self.refused += 1
            raise ConnectionError(f"no route for {entry[0]}")
        self.got.append(entry)

    def open(self, start):
        self.opened.append(start)
        self._take("open", start.first)

    def log(self, step, values):
        self._take("log", step, values)

    def table(self, step, name, rows):
        self._take("table", step, name, rows)

    def close(self, status):
        self._take("close", status)


def begun(tmp_path, board, resumed_from=None, **settings):
    outbox = Outbox(board, **settings)
    outbox.begin(PLAN, "a1b2", resumed_from, tmp_path)
    return outbox


def test_everything_arrives_in_order(tmp_path):
    board, samples = Board(), canned_samples()
    outbox = begun(tmp_path, board, 3, rows=2, every=2)
    for step in (3, 4):
        outbox.metrics(step, {"train/loss": 0.5})
        outbox.samples(step, None, samples)
        outbox.samples(step, "held", samples)
    outbox.finish("completed")
    outbox.finish("completed")
    assert [entry[:3] if entry[0] == "table" else entry for entry in board.got] == [
        ("open", 3), ("log", 3, {"train/loss": 0.5}), ("table", 3, "eval/held/samples"),
        ("log", 4, {"train/loss": 0.5}), ("table", 4, "rollout/samples"), ("table", 4, "eval/held/samples"),
        ("close", "completed")]
    assert all(len(entry[3]) == 2 and set(entry[3][0]) == {*COLUMNS} for entry in board.got if entry[0] == "table")


def test_a_service_gets_no_secret(tmp_path):
    board = Board()
    begun(tmp_path, board).finish("completed")
    assert "sesame" not in str(board.opened) and board.opened[0].options["rollout.num_rollout"] == 5


def test_rows_are_spread_over_the_rollout():
    samples = canned_samples()
    assert [row["answer"] for row in rows_of(0, samples, 3)] == [samples[i].text for i in (0, 2, 4)]
    assert len(rows_of(0, samples, 100)) == len(samples)


def test_a_service_that_hangs_holds_up_nothing_and_what_is_lost_is_told(tmp_path):
    board = Board()
    board.gate.clear()
    outbox, begin, told = begun(tmp_path, board, room=10, patience=0.3), time.monotonic(), []
    for step in range(50):
        try:
            outbox.metrics(step, {"train/loss": 0.5})
        except SendError as error:
            told.append(str(error))
    with pytest.raises(SendError) as end:
        outbox.finish("completed")
    assert time.monotonic() - begin < 2 and len(told) == 1
    assert "50 entries" in str(end.value)
    board.gate.set()


def test_an_error_is_told_once_and_what_was_lost_at_the_end(tmp_path):
    board, told = Board(refuses={"log"}), []
    outbox = begun(tmp_path, board)
    for step in range(5):
        try:
            outbox.metrics(step, {"train/loss": 0.5})
        except SendError as error:
            told.append(str(error))
        board.has_refused(step + 1)
    with pytest.raises(SendError) as end:
        outbox.finish("failed")
    assert len(told) == 1 and "no route for log" in told[0] and "5 entries" in str(end.value)
    assert board.got == [("open", 0), ("close", "failed")]


def test_a_service_that_comes_back_gets_everything(tmp_path, monkeypatch):
    monkeypatch.setattr(tracker, "RETRY", 0.05)
    board = Board(refuses={"open"})
    outbox = begun(tmp_path, board)
    board.has_refused(2)
    board.refuses.clear()
    with pytest.raises(SendError, match="no route for open"):
        outbox.metrics(0, {"train/loss": 0.5})
    outbox.finish("completed")
    assert len(board.opened) > 1 and board.got == [("open", 0), ("log", 0, {"train/loss": 0.5}), ("close", "completed")]


def test_a_service_is_opened_once_more_when_the_run_ends_amid_an_attempt(tmp_path):
    board, opened = Board(refuses={"open"}), Board.open

    def first(start):
        board.open = functools.partial(opened, board)
        assert outbox._ending.wait(20)
        try:
            board.open(start)
        finally:
            board.refuses.clear()

    board.open, outbox = first, Outbox(board)
    outbox.begin(PLAN, "a1b2", None, tmp_path)
    outbox.metrics(0, {"train/loss": 0.5})
    outbox.finish("completed")
    assert board.got == [("open", 0), ("log", 0, {"train/loss": 0.5}), ("close", "completed")]


def test_a_service_that_never_opens_loses_what_was_handed_over(tmp_path):
    board = Board(refuses={"open"})
    outbox = begun(tmp_path, board)
    with contextlib.suppress(SendError):
        outbox.metrics(0, {"train/loss": 0.5})
    with pytest.raises(SendError, match="1 entries"):
        outbox.finish("interrupted")
    assert board.got == []


def test_an_instance_that_never_began_does_nothing():
    outbox = Outbox(Board())
    outbox.metrics(0, {"train/loss": 0.5})
    outbox.samples(0, None, canned_samples())
    outbox.finish("completed")


def test_a_password_in_an_address_is_refused():
    without_password("https://user@host:80/x", "board.host", "set BOARD_KEY")
    with pytest.raises(ConfigError) as refused:
        without_password("https://user:pass1@host/x", "board.host", "set BOARD_KEY")
    assert "pass1" not in str(refused.value) and "BOARD_KEY" in str(refused.value)
