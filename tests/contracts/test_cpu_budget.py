"""A test of the gate that uses too much CPU fails, with its name and seconds: children count, shared fixtures not.

What is too much is measured in the seconds of one machine, so a slower one has more of them.
"""

import os
import re
import subprocess
import sys

import pytest
from source import ROOT

from tests import cpu_budget

CONFTEST = """
from tests import cpu_budget
cpu_budget.LIMIT = 0.3
cpu_budget.REFERENCE *= LONGER
cpu_budget.REFERENCE_START *= LONGER
pytest_plugins = ["tests.cpu_budget"]
"""
TESTS = """
import subprocess, sys, time
import pytest

SPIN = "import time\\nwhile time.process_time() < 0.4: pass"

def spin():
    end = time.process_time() + 0.4
    while time.process_time() < end:
        pass

@pytest.fixture(scope="module")
def shared():
    spin()

def test_quick(): pass
def test_here(): spin()
def test_child(): subprocess.run([sys.executable, "-c", SPIN], check=True)
def test_sleeps(): time.sleep(1)
def test_child_that_goes_on(request):
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    request.addfinalizer(child.wait)
    request.addfinalizer(child.kill)
    end = time.monotonic() + 60
    while child.poll() is None and time.monotonic() < end:
        with open(f"/proc/{child.pid}/stat") as file:
            if sum(map(int, file.read().rpartition(")")[2].split()[11:13])) > 40: break
        time.sleep(0.1)
def test_shared(shared): pass
@pytest.mark.full
def test_full(): spin()
@pytest.mark.slow
def test_slow(): spin()
"""


def run(tmp_path, longer, *which):
    """Run TESTS for a machine of reference that takes so many times as long as it does."""
    (tmp_path / "conftest.py").write_text(CONFTEST.replace("LONGER", f"{longer!r}"))
    (tmp_path / "test_them.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  full\n  slow\n")
    return subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_them.py", *which],
                          cwd=tmp_path, text=True, capture_output=True, timeout=300, check=False,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_who_uses_too_much_is_named(tmp_path):
    done = run(tmp_path, 500.0)  # none is so slow as the machine of reference
    named = re.findall(r"^test_them.py::(\w+) used (\d+\.\d) s of CPU", done.stdout, re.MULTILINE)
    assert [name for name, _ in named] == ["test_here", "test_child", "test_child_that_goes_on"], done.stdout
    assert all(0.3 < float(seconds) < 30 for _, seconds in named)
    assert "8 passed" in done.stdout and "3 errors" in done.stdout
    assert "may use 0.3 here" in done.stdout


def test_a_slower_machine_has_more_seconds(tmp_path):
    done = run(tmp_path, 1 / 100, "-k", "test_quick or test_here")
    assert "2 passed" in done.stdout and "error" not in done.stdout, done.stdout


@pytest.mark.parametrize(("slowness", "seconds"), [(0.4, 10), (1, 10), (1.1, 10), (1.2, 18), (2, 30), (3.5, 52.5)])
def test_the_limit_grows_with_slowness(slowness, seconds):
    assert cpu_budget.limit(slowness) == pytest.approx(seconds)


def test_the_work_takes_long_enough_to_be_measured():
    assert 0.002 < cpu_budget.measure(3) < 1
    assert 0.02 < cpu_budget.start() < 5


def test_what_is_slowest_counts(monkeypatch):
    monkeypatch.setattr(cpu_budget, "measure", lambda: cpu_budget.REFERENCE * 1.05)
    monkeypatch.setattr(cpu_budget, "start", lambda: cpu_budget.REFERENCE_START * 1.4)
    assert cpu_budget.slowness() == pytest.approx(1.4)


def test_a_machine_that_has_become_slower_is_measured_again(monkeypatch):
    found = iter([1.2, 1.0, 3.0])
    monkeypatch.setattr(cpu_budget, "slowness", lambda: next(found))
    budget = cpu_budget.CpuBudget()
    assert [budget.allowed(used) for used in (9, 12, 17, 19, 40, 44)] == pytest.approx([10, 18, 18, 18, 45, 45])
