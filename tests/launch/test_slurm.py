"""launch/slurm.sh runs: stand-ins for Slurm's commands have loopback addresses as nodes; Ray and Miles are real."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from miles_core.types import TRACKER

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPT = ROOT / "launch" / "slurm.sh"
BIN = Path(sys.executable).parent
RUN = ["examples/steps/sums.toml", "--no-live", "--rollout-batch-size", "4", "--actor-num-nodes", "2",
       "--actor-num-gpus-per-node", "1", "--save-interval", "1"]
LIMIT = 600.0
"""Seconds that a whole job may take, on a machine that does much else."""


class Job:
    """A batch script that runs as Slurm starts it, on two nodes."""

    def __init__(self, folder: Path, *flags: str, **environment: str):
        self.number = str(os.getpid())
        self.session = Path(f"/tmp/ray-{self.number}")
        self.process = subprocess.Popen(
            [SCRIPT, *RUN, "--run-dir", folder / "run", "--save", folder / "run/checkpoints", *flags], cwd=ROOT,
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={
                **os.environ, "PATH": f"{HERE}:{os.environ['PATH']}", "SLURM_JOB_ID": self.number,
                "SLURM_JOB_NODELIST": "127.0.0.2,127.0.0.3", "TMPDIR": str(folder),
                "MILES_VENV": str(BIN.parent), "MILES_RAY_WORDS": "--object-store-memory=80000000", **environment})

    def ended(self, seconds: float) -> tuple[int, str]:
        """Exit status and what was printed.

        Raises:
            subprocess.TimeoutExpired: it runs on.
        """
        said, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode, said

    def left(self) -> dict[int, str]:
        """Processes that were started by the job, and their words."""
        mark, found = f"SLURM_JOB_ID={self.number}".encode(), {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_text()
        return found


@pytest.fixture
def started(tmp_path):
    """Starts a job with these flags and variables; as with Slurm none of its processes outlives it."""
    jobs = []

    def start(*flags: str, **environment: str) -> Job:
        jobs.append(Job(tmp_path, *flags, **environment))
        return jobs[-1]

    yield start
    for job in jobs:
        job.process.kill()
        job.process.wait(10)
        for process in job.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        shutil.rmtree(job.session, ignore_errors=True)


def fake_ray(folder: Path, text: str) -> str:
    """An environment whose `ray` is this."""
    path = folder / "venv/bin/ray"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return str(folder / "venv")


def test_bash_and_shellcheck_have_nothing_to_say():
    for command in (["bash", "-n"], [BIN / "shellcheck", "--severity=warning"]):
        subprocess.run([*command, SCRIPT], check=True, timeout=60)


def test_a_node_that_does_not_start_ends_the_job_with_what_ray_said(started, tmp_path):
    job = started(MILES_VENV=fake_ray(tmp_path, "echo no room on this node; exit 3"))
    status, said = job.ended(60)
    assert status == 1 and "127.0.0.2" in said and "no room on this node" in said
    assert not job.left()


def test_a_node_that_hangs_and_takes_no_signal_is_given_up_in_time(started, tmp_path):
    job = started(MILES_VENV=fake_ray(tmp_path, "trap '' TERM; while true; do sleep 0.1; done"),
                  MILES_START_TIMEOUT="1", MILES_STOP_TIMEOUT="1")
    status, said = job.ended(60)
    assert status == 1 and "MILES_START_TIMEOUT" in said


@pytest.mark.slow
@pytest.mark.integration
def test_a_run_over_two_nodes_trains_to_its_end_and_leaves_nothing(started, tmp_path):
    job = started("--num-rollout", "2")
    status, said = job.ended(LIMIT)
    assert status == 0 and "2/2 rollouts" in said, said[-3000:]
    logs = {path.name for path in (tmp_path / "run/logs").iterdir()}
    assert {"trainer-rank-0.log", "trainer-rank-1.log"} <= logs
    assert not job.left() and not job.session.exists()
    assert not list(tmp_path.glob("tmp.*")), "what mktemp made"


@pytest.mark.slow
@pytest.mark.integration
def test_a_job_whose_time_is_up_ends_its_run_and_the_next_goes_on(started, tmp_path):
    job = started("--num-rollout", "100")
    events, end = tmp_path / "run/events.jsonl", time.monotonic() + LIMIT
    while not (events.is_file() and events.read_text().count('"event":"metrics"') >= 2):
        assert time.monotonic() < end and job.process.poll() is None, job.ended(60)
        time.sleep(0.2)
    job.process.send_signal(signal.SIGTERM)
    status, said = job.ended(LIMIT)
    assert status == 143 and str(job.session) in said, said[-3000:]
    assert '"status":"interrupted"' in events.read_text() and not job.left()
    done = int((tmp_path / "run/checkpoints" / TRACKER).read_text())
    again = started("--load", str(tmp_path / "run/checkpoints"), "--num-rollout", str(done + 1))
    status, said = again.ended(LIMIT)
    assert status == 0 and f"{done + 1}/{done + 1} rollouts" in said, said[-3000:]
