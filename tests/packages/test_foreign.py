"""An engine, a trainer and a weight sync of somebody else's learn, where Megatron-core and SGLang are not installed."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from clean import PIP, ROOT, shell, wheel

from miles_core.record.events import read

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.xdist_group("packages")]
MILES = ("-c", "from miles_core.cli import main; main()")
PARTS = ("--plugin", "foreign", "--engine", "foreign", "--trainer", "foreign", "--weight-sync", "foreign")


@pytest.fixture
def python(archives, alone, tmp_path) -> Path:
    """The Python of an environment with the core, grpo, math and the wheel of tests/foreign."""
    source, built = tmp_path / "source", tmp_path / "built"
    shutil.copytree(ROOT / "tests/foreign", source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shell(sys.executable, *PIP, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", built, source,
          cwd=tmp_path)
    found, add = alone
    add(wheel(archives, "miles-grpo"), wheel(archives, "miles-math"), wheel(built, "miles-foreign"))
    return found


def packages(python: Path, cwd: Path) -> set[str]:
    """What is installed."""
    return {one["name"] for one in json.loads(shell(python, *PIP, "list", "--format", "json", cwd=cwd))}


def told(run: Path) -> dict:
    """Rollout -> metrics that are no times, and hashes of every weight and column."""
    found = {}
    for event in read(run / "events.jsonl"):
        if event["event"] in ("metrics", "hashes"):
            kept = event.get("metrics") or {name: event[name] for name in ("weights", "batch")}
            found[event["event"], event["rollout_id"]] = {
                name: value for name, value in kept.items() if not name.startswith("perf/")}
    return found


def test_it_learns_and_goes_on_where_it_was_stopped(python, project):
    there = packages(python, project)
    assert "miles-foreign" in there and not there & {
        "megatron-core", "miles-megatron", "miles-local", "miles-sglang", "sglang"}

    def run(name: str, *flags: str) -> Path:
        shell(python, *MILES, "run", "examples/demo.toml", *PARTS, "--run-dir", f"runs/{name}", "--no-live",
              "--debug-determinism", *flags, cwd=project, seconds=3600)
        return project / "runs" / name

    whole = run("whole")
    accuracy = [event["metrics"]["eval/sums"] for event in read(whole / "events.jsonl") if event["event"] == "eval"]
    assert 0.2 <= accuracy[0] <= 0.5 and accuracy[-1] - accuracy[0] >= 0.20
    run("halves", "--debug-exit-after-rollout", "10")
    assert told(run("halves")) == told(whole) and len(told(whole)) == 40


def test_it_passes_the_kits(python, alone, archives, project):
    """With miles-testing, which brings no Megatron-core either."""
    _, add = alone
    add(wheel(archives, "miles-testing"))
    assert not packages(python, project) & {"megatron-core", "miles-megatron", "miles-local", "miles-sglang"}
    shutil.copy(ROOT / "tests/foreign/tests/parts.py", project / "parts.py")
    (project / "pyproject.toml").unlink()  # this repository's; a stranger's project has its own
    shell(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "parts.py", cwd=project)
