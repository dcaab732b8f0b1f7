"""Kill it anywhere, resume: the same weights, bit for bit, as the run that was not killed.

A run without a kill records every change of its files. Then a new run is killed at each of them, resumed by the same
command, and compared with the first in everything but times: weights, Adam's moments, schedule, metrics, samples.
"""

from __future__ import annotations

import random
import sys
import time

import pytest
from miles_testing.kill_resume import KillResume

pytestmark = pytest.mark.integration

ROLLOUTS = 6
PARTS = 2
"""How many tests share the operations of one setting, for as many processes (pytest -n)."""
COMMON = ["--rollout-shuffle", "--lr-decay-style", "linear", "--threads", "1"]
ONE_STEP, TWO_STEPS = "one step", "two steps, filter, eval, export"


@pytest.fixture(params=[ONE_STEP, TWO_STEPS])
def course(request, run_file, tiny, tmp_path, picky) -> KillResume:
    """A checkpoint after each rollout of one step; or after every second one, of two steps, with all that can be on."""
    argv = [run_file(), *COMMON]
    if request.param == ONE_STEP:
        argv += ["--save-interval", "1", "--num-steps-per-rollout", "1"]
    else:
        argv += ["--save-interval", "2", "--num-steps-per-rollout", "2", "--save-hf", "run/hf/{rollout_id}",
                 "--plugin", picky, "--over-sampling-batch-size", "6",
                 "--eval-prompt-data", "eval", tiny / "eval.jsonl", "--eval-interval", "2"]
    return KillResume(tmp_path, argv, rollouts=ROLLOUTS)


@pytest.mark.full
@pytest.mark.parametrize("course", [TWO_STEPS], indirect=True)
def test_a_sample_of_kills(course):
    recorded = course.reference()
    draw = random.Random(0)
    kinds = ("open", "fsync", "mkdir", "rename", "copy")
    points = [draw.choice([o for o in recorded if o.kind == kind]) for kind in kinds]
    points += [next(o for o in recorded if part in o.path) for part in ("distcp", ".tmp-latest")]  # the first save
    found = {str(point): course.killed_at(point) for point in points}
    torn = draw.choice([o for o in recorded if o.tearable and o.path == "events.jsonl"])
    found["torn"] = course.killed_at(torn, torn=True)
    found["twice"] = course.killed_at(draw.choice(recorded), again=40)
    found |= {f"after {seconds:.2f}s": course.killed_after(seconds, name=f"after-{seconds}")
              for seconds in (course.seconds * draw.uniform(0.3, 0.8) for _ in range(2))}
    assert not {where: wrong for where, wrong in found.items() if wrong}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_a_kill_at_every_operation(course, part, capsys):
    """The folder's every state: before each operation, in the middle of each write, and after the last operation."""
    recorded = course.reference()
    assert len(recorded) > 200
    mine = recorded[part::PARTS]
    points = [(operation, False) for operation in mine] + [(o, True) for o in mine if o.tearable]
    begin, killed, failures = time.monotonic(), 0, {}
    for count, (operation, torn) in enumerate(points, 1):
        wrong = course.killed_at(operation, torn=torn)
        killed += not torn and not any(text.startswith("not killed") for text in wrong)
        if wrong:
            failures[f"{'torn ' * torn}{operation}"] = wrong
        if count % 20 == 0 or wrong or count == len(points):
            _tell(capsys, f"part {part}: {count} of {len(points)} kills, {len(failures)} failures, "
                          f"{time.monotonic() - begin:.0f} s" + (f"; {operation}: {wrong}" if wrong else ""))
    _tell(capsys, f"part {part}: killed at {killed} of {len(mine)} of {len(recorded)} operations")
    assert not failures
    assert killed == len(mine)
    assert course.finish("reference"), "nothing is left to do"


@pytest.mark.slow
def test_a_kill_during_the_resume(course):
    recorded = course.reference()
    saves = [o for o in recorded if o.kind == "rename" and "iter_" in o.path]
    found = {(str(point), again): course.killed_at(point, again=again)
             for point in (saves[0], saves[-1], recorded[len(recorded) // 2]) for again in (8, 20, 36)}
    assert not {where: wrong for where, wrong in found.items() if wrong}


@pytest.mark.slow
def test_twenty_kills_at_random_times(course, capsys):
    course.reference()
    draw, landed, failures = random.Random(1), 0, {}
    for attempt in range(60):
        seconds = draw.uniform(0.05, 1.0) * course.seconds
        wrong = course.killed_after(seconds, name=f"random-{attempt}")
        landed += wrong is not None
        if wrong:
            failures[f"after {seconds:.2f} s"] = wrong
        if landed == 20:
            break
    _tell(capsys, f"{landed} random kills, {len(failures)} failures")
    assert landed == 20 and not failures


def _tell(capsys, text: str) -> None:
    with capsys.disabled():
        print(f"\n  {text}", end="", file=sys.stderr, flush=True)
