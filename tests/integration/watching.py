"""What the tests of faults look at a run with, from outside, and the table that they write."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from miles_core.record.events import read
from tests.integration.faults import PAGE


@dataclass
class Cell:
    """One row of the table.

    Args:
        seconds: from the fault to the event that tells of it.
        said: that event's sentence, or the command's.
        trained, tainted: samples that the run took into a batch, and those of them that are not what the healthy engine
            drew, or too old.
        problems: what is not as promised.
    """

    fault: str
    mode: str
    seconds: float
    said: str
    end: str
    trained: int
    tainted: int
    problems: list[str]

    def __str__(self) -> str:
        said = self.said.replace("|", "\\|").replace("<", "&lt;")
        return (f"| {self.fault} | {self.mode} | {self.seconds:.1f} | {said} | {self.end} | "
                f"{self.tainted} of {self.trained} |")


class Watch:
    """Looks at a run from outside until it ends: when it told of the fault.

    Args:
        tells: what an event says of the fault, None where nothing.
        act: what is done to the process, once there is an event that it waits for; returns whether it was done.
        limit: seconds after which nobody looks any more.
    """

    def __init__(self, run: Path, tells: Callable[[dict], str | None],
                 act: Callable[[object, list[dict]], bool] = lambda process, events: True, limit: float = 100.0):
        self._path, self._tells, self._act, self._limit = run / "events.jsonl", tells, act, limit
        self.told: tuple[float, str] | None = None
        self.pid, self._size, self._acted = 0, -1, False

    def __call__(self, process) -> None:
        self.pid, limit = process.pid, time.monotonic() + self._limit
        while process.is_alive() and time.monotonic() < limit:
            self._look(process)
            time.sleep(0.01)
        self._look(process)
        self.ended = time.monotonic()

    def _look(self, process) -> None:
        if not self._path.exists() or self._path.stat().st_size == self._size:
            return
        self._size = self._path.stat().st_size
        with contextlib.suppress(Exception):  # a damaged record has nothing to say
            events = list(read(self._path, everything=True))
            self._acted = self._acted or self._act(process, events)
            if self.told is None and (said := next(filter(None, map(self._tells, events)), None)):
                self.told = time.monotonic(), said


def apart(folder: Path) -> None:
    """In the command's process: a session of its own, deaf to SIGINT, and a folder of its own for temporary files."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    (folder / "temporary").mkdir(exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "temporary")


def left_of(session: int, seconds: float = 5.0) -> list[str]:
    """Command lines of what is still there of a session after some seconds, or as soon as nothing is."""
    limit = time.monotonic() + seconds
    while True:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(process.cmdline()))
        if not found or time.monotonic() > limit:
            return found
        time.sleep(0.05)


def shown(text: str) -> str:
    """A sentence without its remedy, on one line of bounded length."""
    text = " ".join(text.removeprefix("Error: ").partition(" Fix: ")[0].split())
    return text if len(text) <= 150 else f"{text[:147]}..."


def write(cells: Sequence[Cell], mark: str, command: str) -> None:
    """Put a table into docs/reliability.md, between its marks."""
    text = PAGE.read_text(encoding="utf-8")
    head, rest = text.split(f"<!-- {mark} -->\n")[0], text.split(f"<!-- end of {mark} -->\n")[1]
    lines = ["| fault | mode | seen after (s) | said | end | tainted |", "|---|---|---|---|---|---|", *map(str, cells)]
    day = f"\nWritten on {time.strftime('%F')} by `{command}`.\n"
    PAGE.write_text(f"{head}<!-- {mark} -->\n" + "\n".join(lines) + f"\n{day}<!-- end of {mark} -->\n{rest}")
