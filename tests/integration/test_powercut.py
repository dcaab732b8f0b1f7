"""Cut the power anywhere: what is published is whole, and the run goes on from it, or says what is missing."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from miles_megatron.checkpoint import latest, never_saved
from miles_testing.kill_resume import KillResume

from miles_core.record.directory import RunDirectory
from miles_core.record.events import EventLog, read
from miles_core.record.replay import load_batch
from miles_core.types import TRACKER
from tests.integration.powercut import Disk, Recorder

pytestmark = pytest.mark.integration

ROLLOUTS = 4
PUBLISHED = ("checkpoints/iter_*/**/*", "hf/[!.]*/**/*", "samples/*.jsonl", "debug/*.safetensors", "plan.*",
             "plugins.lock")


@pytest.fixture
def course(run_file, tiny, tmp_path) -> KillResume:
    return KillResume(tmp_path, [
        run_file(), "--threads", "1", "--save-interval", "1", "--num-steps-per-rollout", "1",
        "--save-hf", "run/hf/{rollout_id}", "--save-debug-rollout-data", "run/debug/{rollout_id}.safetensors",
        "--eval-prompt-data", "eval", tiny / "eval.jsonl", "--eval-interval", "2"], rollouts=ROLLOUTS)


def recorded(course: KillResume) -> tuple[Path, Disk]:
    """A run that nothing befell, and its disk."""
    course.start("reference", "--plan")
    (course.path / "reference/run").mkdir()
    run = course.finish("reference", before=Recorder(course.path / "reference/run", course.log("reference")))
    return run, Disk(run, course.log("reference"))


def contents(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for pattern in PUBLISHED for path in run.glob(pattern)
            if path.is_file()}


def told(run: Path, done: int) -> list[dict]:
    """What the record says of the rollouts before a checkpoint."""
    return [event for event in read(run / "events.jsonl")
            if event["event"] in ("metrics", "eval", "drop") and event["rollout_id"] < done]


def problems(run: Path, reference: Path, whole: dict[str, bytes]) -> list[str]:
    """What a resumed run would miss or misread, by the readers that it uses."""
    mine, folder = contents(run), run / "checkpoints"
    found = [f"{name} is torn" for name in mine if mine[name] != whole.get(name)]
    folders = {str(path.relative_to(run)) for pattern in ("checkpoints/iter_*", "hf/*") for path in run.glob(pattern)
               if not path.name.startswith(".")}
    found += [f"{name} is missing" for name in whole if name not in mine
              and any(name.startswith(f"{folder}/") for folder in folders)]
    RunDirectory(run).acquire().release()
    EventLog(run / "events.jsonl").close()
    if never_saved(folder):
        return found
    done = latest(folder)
    if (folder / TRACKER).exists() and (folder / TRACKER).read_text() != f"{done}\n":
        found.append("the tracker is torn")
    if told(run, done) != told(reference, done):
        found.append(f"the record lacks something of the {done} rollouts before the checkpoint")
    wanted = [f"{kind}{rollout:{digits}}{end}" for rollout in range(done) for kind, digits, end in (
        ("samples/rollout_", "06", ".jsonl"), ("debug/", "", ".safetensors"))]
    found += [f"{name} is missing" for name in [*wanted, f"hf/{done}/config.json"] if name not in mine]
    for rollout in range(done):
        load_batch(str(run / "debug/{rollout_id}.safetensors"), rollout)
    return found


def cut(course: KillResume, disk: Disk, run: Path, states: int,
        draw: random.Random) -> tuple[int, dict[str, list[str]]]:
    """Look at so many states of the disk for each operation; how many there were, and what was wrong."""
    whole, wrong, count = contents(run), {}, 0
    disk.restart()
    for number, step in enumerate(disk.steps):
        disk.step(number)
        for _ in range(states):
            place = course.path / "cut"
            disk.lay_out(place, draw)
            count += 1
            try:
                found = problems(place, run, whole)
            except Exception as error:  # noqa: BLE001 - whatever a reader raises is told
                found = [repr(error)]
            if found:
                wrong[f"{count}: after {number} {step}"] = found
            shutil.rmtree(place)
    return count, wrong


@pytest.mark.full
def test_a_power_cut_leaves_what_is_published_whole(course):
    run, disk = recorded(course)
    states = -(-500 // len(disk.steps))
    count, wrong = cut(course, disk, run, states, random.Random(0))
    assert count >= 500
    assert not wrong, dict(list(wrong.items())[:5])


@pytest.mark.parametrize("share", [
    pytest.param(0.7, marks=pytest.mark.full), *(pytest.param(n / 12, marks=pytest.mark.slow) for n in range(1, 12))])
def test_a_run_goes_on_after_a_power_cut(course, share):
    """To the same weights, metrics and samples, bit for bit."""
    run, disk = recorded(course)
    draw = random.Random(share)
    disk.restart()
    for number in range(int(share * len(disk.steps))):
        disk.step(number)
    (course.path / "cut").mkdir()
    disk.lay_out(course.path / "cut/run", draw)
    assert not course.resumed("cut")
