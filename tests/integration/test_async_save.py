"""--async-save in whole runs: the checkpoints of a run without it, whatever ends it in the middle of a save."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from miles_megatron.testing.ranks import batches
from miles_testing import kill_resume
from miles_testing.kill_resume import KillResume, checkpoint, problems

from miles_core.plugins.plan import prepare
from miles_core.record.events import read

pytestmark = pytest.mark.integration

FAULTY = Path(__file__).parent / "faulty.py"
RANKS = ["--trainer-host", "process", "--rollout-max-response-len", "41", "--max-tokens-per-gpu", "128", "--lr", "1e-3"]


@pytest.fixture
def course(run_file, tmp_path):
    """(rollouts, *flags) -> runs that save after each rollout; killed, their files change in no fixed order."""

    def make(rollouts: int, *argv: str | Path) -> KillResume:
        common = [run_file(), "--rollout-shuffle", "--lr-decay-style", "linear", "--save-interval", "1",
                  "--threads", "1"]
        return KillResume(tmp_path, [*common, *argv], rollouts=rollouts, judge=lambda run: problems(
            run, tmp_path / "reference/run", rollouts=rollouts))

    return make


def test_a_run_saves_what_it_saves_without(course):
    runs = course(2)
    plain, beside = runs.finish("plain"), runs.finish("beside", "--async-save")
    assert checkpoint(beside) == checkpoint(plain)
    saves = [event for event in read(beside / "events.jsonl") if event["event"] == "checkpoint"]
    assert [event["staged"] for event in saves] == [True, False]
    assert "GiB of a rank that writes checkpoints" in (beside / "plan.txt").read_text()
    assert sorted(path.name for path in (beside / "checkpoints").glob("iter_*")) == ["iter_0000001", "iter_0000002"]


@pytest.mark.full
def test_kills_in_the_middle_of_a_save(course):
    """At each kind of change below the folder that is to be published, before and after the first checkpoint."""
    runs = course(4, "--async-save")
    recorded, draw = runs.reference(), random.Random(0)
    found = {}
    for name in (".tmp-iter_0000001", ".tmp-iter_0000003", "iter_0000002", ".tmp-latest"):
        saving = [one for one in recorded if f"checkpoints/{name}" in one.path]
        for kind in sorted({one.kind for one in saving}):
            point = draw.choice([one for one in saving if one.kind == kind])
            found[str(point)] = runs.killed_at(point, torn=point.tearable and draw.random() < 0.5)
    assert len(found) > 8 and not {where: wrong for where, wrong in found.items() if wrong}


@pytest.mark.full
def test_a_full_disk_ends_the_run_and_the_checkpoint_before_is_the_latest(course):
    """The write fails beside a rollout, whose next call is told."""
    runs = course(4, "--async-save")
    ended = runs.start("full", "--plugin", FAULTY, "--faulty.fault", "disk full", "--faulty.since", "3")
    assert ended.code == 1 and "disk is full" in ended.err
    run = runs.path / "full/run"
    kept = int((run / "checkpoints/latest_checkpointed_iteration.txt").read_text())
    assert kept in (1, 2) and not kill_resume.leftovers(run)  # the second may have been written before
    assert checkpoint(runs.finish("full")) == checkpoint(runs.finish("reference"))


@pytest.mark.full
def test_retention_removes_what_is_published(course):
    runs = course(4, "--async-save", "--plugin", "retention", "--retention.keep-last", "1")
    run = runs.finish("kept")
    assert [path.name for path in (run / "checkpoints").glob("iter_*")] == ["iter_0000004"]
    assert "at most 3 at a time" in (run / "plan.txt").read_text()


@pytest.mark.full
@pytest.mark.parametrize("layout", [[], ["--tensor-model-parallel-size", "2"]], ids=["dp2", "tp2"])
def test_two_ranks_write_what_they_write_without(run_file, tmp_path, layout, two):
    given = [*RANKS, "--actor-num-gpus-per-node", "2", *layout]
    for name, more in {"plain": [], "beside": ["--async-save"]}.items():
        plan = prepare(run_file(), [*given, *more])
        two.train(plan, batches(2), save=tmp_path / name / "checkpoints")
    assert checkpoint(tmp_path / "beside") == checkpoint(tmp_path / "plain")
    files = {path.name for path in (tmp_path / "beside/checkpoints/iter_0000002").glob("*.distcp")}
    assert len(files) == (2 if layout else 1), files
