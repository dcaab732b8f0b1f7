"""--max-restarts: a run whose trainer was killed, again and again, ends with the bits of the run that was not.

And however a run ends, none of its processes is left.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest
from miles_report.report import write_report
from miles_testing import kill_resume
from miles_testing.kill_resume import KillResume

from miles_core.record.events import read
from tests.integration.watching import left_of

pytestmark = pytest.mark.integration

DIES = '''
"""Kills the trainer's first rank once, in the step of the rollout after the first checkpoint."""
import os
import signal
from pathlib import Path

from miles_core import hookimpl

ONCE = Path("killed")


class Dies:
    """Dies once."""

    @hookimpl
    def train_step(self, proceed, access):
        if access.batch.rollout_id == 2 and not ONCE.exists():
            ONCE.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return proceed()
'''


class Session:
    """Remembers the process that leads the session of a run (before=os.setsid)."""

    pid = 0

    def __call__(self, process) -> None:
        self.pid = process.pid


@pytest.fixture
def session() -> Session:
    return Session()


def in_the_background() -> None:
    """As a shell starts a job with &: in a session of its own here, and deaf to SIGINT."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def restarts(run: Path) -> list[dict]:
    return [event for event in read(run / "events.jsonl") if event["event"] == "restart"]


def starts(run: Path) -> list[int | None]:
    events = read(run / "events.jsonl", everything=True)
    return [event["resumed_from"] for event in events if event["event"] == "run_start"]


@pytest.mark.full
def test_a_killed_trainer_goes_on_from_the_last_checkpoint_by_itself(run_file, tmp_path, session):
    (tmp_path / "dies.py").write_text(DIES)
    common = [run_file(), "--threads", "1", "--save-interval", "2"]
    reference = KillResume(tmp_path, common, rollouts=4).finish("reference")
    course = KillResume(tmp_path, [*common, "--plugin", tmp_path / "dies.py", "--trainer-host", "process",
                               "--max-restarts", "1"], rollouts=4)
    outcome = course.start("killed", before=os.setsid, while_running=session)
    assert outcome.code == 0, outcome.err
    assert not left_of(session.pid)
    run = tmp_path / "killed" / "run"
    assert not kill_resume.problems(run, reference, rollouts=4)
    assert starts(run) == [None, 2]
    [event] = restarts(run)
    assert (event["count"], event["most"], event["resumes"]) == (1, 1, "run/checkpoints")
    assert event["culprit"] == "the process 'trainer' died in step()" and "exit code -9" in event["error"]
    told = "restart 1 of 1 from the last checkpoint in run/checkpoints: the process 'trainer' died in step()"
    assert told in outcome.out and told in write_report(run).read_text()
    log = (run / "logs/trainer-rank-0.log").read_text()
    assert log.count("Loaded checkpoint from") == 2
    assert "weight_sync to version 1" in (run / "logs/run.log").read_text()


@pytest.mark.full
def test_restarts_that_are_used_up_end_the_run_with_the_rank_s_name(run_file, tmp_path, session):
    """And a run without a checkpoint of its own goes back to its start, whatever lies in --save."""
    (tmp_path / "dies.py").write_text(DIES.replace("not ONCE.exists()", "True"))
    course = KillResume(tmp_path, [run_file(), "--threads", "1", "--plugin", tmp_path / "dies.py", "--trainer-host",
                               "process", "--max-restarts", "1"], rollouts=4)
    outcome = course.start("killed", before=os.setsid, while_running=session)
    assert outcome.code == 1
    assert not left_of(session.pid)
    assert "the process 'trainer' died in step() (got exit code -9)" in outcome.err
    assert "trainer-rank-0.log" in outcome.err
    run = tmp_path / "killed" / "run"
    assert starts(run) == [None, None]
    assert [event["resumes"] for event in restarts(run)] == [None]
    assert "restart 1 of 1 from the start of the run" in outcome.out


@pytest.mark.full
def test_a_signal_ends_every_process(run_file, tmp_path, session):
    """SIGTERM amid a run whose rank is in a step that takes for ever."""
    (tmp_path / "hangs.py").write_text(DIES.replace("os.kill(os.getpid(), signal.SIGKILL)", "signal.pause()"))
    course = KillResume(tmp_path, [run_file(), "--threads", "1", "--plugin", tmp_path / "hangs.py", "--trainer-host",
                               "process"], rollouts=4)

    def terminate(process) -> None:
        session(process)
        limit = time.monotonic() + 120
        while not (tmp_path / "hung/killed").exists() and time.monotonic() < limit:
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGTERM)
        terminate.at = time.monotonic()

    outcome = course.start("hung", before=in_the_background, while_running=terminate)
    assert outcome.code == 130, outcome
    assert not left_of(session.pid)
    assert time.monotonic() - terminate.at < 30


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--optimizer", "dist_muon")])
def test_a_rank_killed_five_times_changes_no_bit(flags, run_file, tmp_path):
    """Two ranks, which share the optimizer's state; each start loses one of them at a moment of its own. A quick
    machine does some rollouts in each."""
    kills, rollouts, dice = 5, 40, random.Random(4)
    course = KillResume(tmp_path, [run_file(), "--actor-num-gpus-per-node", "2", "--threads", "1", "--rollout-shuffle",
                               "--save-interval", "1", "--max-restarts", str(kills), *flags], rollouts=rollouts)
    reference = course.finish("reference")
    run = tmp_path / "killed" / "run"

    def killer(process) -> None:
        for number in range(kills):
            _wait_for_start(run, number + 1, process)
            time.sleep(dice.uniform(0.0, 1.0))
            os.kill(dice.choice(_ranks(process.pid)), signal.SIGKILL)  # reaped only later

    outcome = course.start("killed", while_running=killer, timeout=600)
    assert outcome.code == 0, outcome.err
    assert len(restarts(run)) == kills
    assert not kill_resume.problems(run, reference, rollouts=rollouts)
    print("\n" + "\n".join(f"{event['culprit']}, resumed {event['resumes']}" for event in restarts(run)))


@pytest.mark.slow
def test_a_killed_ray_actor_changes_no_bit(run_file, tmp_path):
    """Rank 1 of two dies in its step in a Ray of the run's own; the reference has local ranks and nobody dies."""
    pytest.importorskip("ray")
    lonely = DIES.replace("== 2 and", "== 2 and torch.distributed.get_rank() == 1 and")
    (tmp_path / "dies.py").write_text(lonely.replace("import signal", "import signal\nimport torch"))
    common = [run_file(), "--threads", "1", "--save-interval", "2", "--actor-num-gpus-per-node", "2"]
    reference = KillResume(tmp_path, common, rollouts=4).finish("reference")
    course = KillResume(tmp_path, [*common, "--plugin", tmp_path / "dies.py", "--placement", "ray",
                                   "--max-restarts", "1"], rollouts=4)
    outcome = course.start("killed", timeout=300)
    assert outcome.code == 0, outcome.err
    run = tmp_path / "killed" / "run"
    assert starts(run) == [None, 2]
    [event] = restarts(run)
    assert event["culprit"] == "the Ray actor of trainer rank 1 died in step()"
    assert not kill_resume.problems(run, reference, rollouts=4)


def _wait_for_start(run: Path, number: int, process) -> None:
    limit = time.monotonic() + 120
    while time.monotonic() < limit and process.is_alive():
        if (run / "events.jsonl").is_file() and len(starts(run)) >= number:
            return
        time.sleep(0.05)
    pytest.fail(f"start {number} never came")


def _ranks(pid: int) -> list[int]:
    """The processes of the trainer's ranks that live."""
    children = [child for child in psutil.Process(pid).children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child.pid for child in children if "spawn_main" in " ".join(child.cmdline())]
