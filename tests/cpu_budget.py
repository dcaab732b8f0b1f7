"""A test of the gate that uses more than LIMIT seconds of CPU fails; the conftest.py of the root loads this for all.

Counted is the CPU time of pytest's process and of every process below it, from the test's set-up to the end of its
teardown. A busy machine may double it, where wall time grows tenfold. Not counted are fixtures which tests share, and
tests marked `full` or `slow`. Whichever test comes first in a process pays for imports and for the fork server, so it
is not judged: in another order it will be.

Ten seconds are those of the machine of reference. A test that is above them has two fixed pieces timed, work in this
process and the start of another; where one of them takes longer than it does there, the limit grows with it.
"""

from __future__ import annotations

import gc
import multiprocessing.forkserver
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

LIMIT = 10.0
REFERENCE = 0.0214
"""CPU seconds of `work` on one of the two cores of docs/benchmarks.md; `python tests/cpu_budget.py` measures them."""
REFERENCE_START = 0.12
"""CPU seconds of `start` there, by what `miles --help` and --plan took there and take of a `start` elsewhere. Files,
memory and the kernel may be slow where `work`, which stays in the cache, is not: neighbours of a virtual machine have
doubled the one and not the other."""
SAME, ROOM = 1.1, 1.5
"""Up to SAME times as long as there, a machine counts as equally fast. A slower one has ROOM beside its slowness: what
a test does need not be slower by the same factor."""
LIBRARY = ("import argparse, asyncio, dataclasses, email.parser, http.client, json, logging.config, sqlite3, tomllib, "
           "typing, unittest, urllib.request, multiprocessing.pool, xml.dom.minidom")
TICKS = os.sysconf("SC_CLK_TCK")
ONCE = ("torch", "transformers", "megatron.core", "torch._dynamo")
"""Modules whose first import takes CPU seconds."""


def cpu_seconds(process: int) -> float:
    """CPU seconds, user and system, of a process and of all below it, those that ended included (Linux)."""
    ticks, waiting = 0, [process]
    while waiting:
        folder = Path("/proc") / str(waiting.pop())
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))  # utime, stime, and both of the children that were waited for
            for thread in (folder / "task").iterdir():
                waiting += map(int, (thread / "children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile: its parent has its time now, or will have
    return ticks / TICKS


def first_costs() -> tuple[object, ...]:
    """What a process pays for once, as far as it has: changes when a test is the first to need it."""
    server = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    return (*(name in sys.modules for name in ONCE), server._forkserver_pid)


def work() -> None:
    """About 20 ms of what tests spend their time with: the interpreter, and products of matrices in one thread."""
    import numpy

    words: dict[str, int] = {}
    for number in range(60_000):
        word = f"{number % 977}"
        words[word] = words.get(word, 0) + number
    square = numpy.full((64, 64), 1 / 64, dtype=numpy.float32)  # OpenBLAS takes no second thread for this size
    for _ in range(2_500):
        square = square @ square


def measure(runs: int = 9) -> float:
    """CPU seconds of `work` here, the median of some runs."""
    seconds, collecting = [], gc.isenabled()
    gc.disable()  # what tests left on the heap would be gone through
    try:
        work()  # imports numpy
        for _ in range(runs):
            begin = time.thread_time()
            work()
            seconds.append(time.thread_time() - begin)
    finally:
        if collecting:
            gc.enable()
    return statistics.median(seconds)


def start() -> float:
    """CPU seconds of a fresh interpreter that imports a part of the standard library, as `miles` starts and imports."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", LIBRARY], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def slowness() -> float:
    """How many times as long as the machine of reference this one takes, for what it is slower at."""
    return max(measure() / REFERENCE, statistics.median(start() for _ in range(5)) / REFERENCE_START)


def limit(slowness: float) -> float:
    """CPU seconds that a test may use on a machine that takes `slowness` times as long as that of reference."""
    return LIMIT if slowness <= SAME else LIMIT * slowness * ROOM


class CpuBudget:
    """Measures one test after the other, and the machine when a test is above what it is allowed so far."""

    def __init__(self) -> None:
        self.start = self.shared = self.slowness = 0.0
        self.inside = 0
        self.paid: tuple[object, ...] = ()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Iterator[None]:
        self.start, self.shared, self.paid = cpu_seconds(os.getpid()), 0.0, first_costs()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Iterator[None]:
        if fixturedef.scope == "function" or self.inside:
            return (yield)
        self.inside, before = 1, cpu_seconds(os.getpid())
        try:
            return (yield)
        finally:
            self.inside = 0
            self.shared += cpu_seconds(os.getpid()) - before

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        outcome = yield
        used = cpu_seconds(os.getpid()) - self.start - self.shared
        exempt = item.get_closest_marker("full") or item.get_closest_marker("slow") or first_costs() != self.paid
        if not exempt and used > (most := self.allowed(used)):
            pytest.fail(f"{item.nodeid} used {used:.1f} s of CPU, and a test of the gate may use {most:.3g} here "
                        f"({LIMIT:g} on the machine of reference; this one takes {self.slowness:.2f} times as long). "
                        "Make it cheaper, let tests share a fixture, or mark it `full`: then it runs with "
                        "`make test-full`.", pytrace=False)
        return outcome

    def allowed(self, used: float) -> float:
        """CPU seconds that a test may use. The machine is measured again where it used more than it might have so far:
        neighbours may have come since."""
        if used > limit(self.slowness):
            self.slowness = max(self.slowness, slowness())
        return limit(self.slowness)


def pytest_configure(config: pytest.Config) -> None:
    """Linux tells which processes are whose children; elsewhere nothing is measured."""
    if Path(f"/proc/self/task/{os.getpid()}/children").exists():
        config.pluginmanager.register(CpuBudget())


if __name__ == "__main__":
    print(f"REFERENCE is {REFERENCE}, and here it is {measure(99):.4f}")
    print(f"REFERENCE_START is {REFERENCE_START}, and here it is {statistics.median(start() for _ in range(21)):.3f}")
