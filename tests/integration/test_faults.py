"""Every fault in every mode: the run says who it was in time, ends cleanly or goes on, and trains on nothing tainted.

`make reliability` runs all of them and writes the table of docs/reliability.md.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from miles_testing import kill_resume
from miles_testing.forked import Outcome
from miles_testing.kill_resume import KillResume

from miles_core.record.events import read
from miles_core.record.replay import load_batch
from miles_core.stages import rollout
from tests.integration.faults import FAULTS, MODES, SECONDS, Fault
from tests.integration.watching import Cell, Watch, apart, left_of, shown, write

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("faults")]

ROLLOUTS, FIRST = 6, 3
"""Rollouts of a run, and of the part before it is resumed."""
CODES = {"completed": 0, "failed": 1, "refused": 2, "interrupted": 130}


def tells_of(fault: str):
    """Event -> its sentence, if it tells of the fault."""
    def error(event: dict) -> str | None:
        return event["text"] if event["event"] == "message" and event["level"] == "error" else None

    def slow(event: dict) -> str | None:
        late = event["event"] == "heartbeat" and event["oldest_s"] > 0.4
        return f"heartbeat: oldest_s {event['oldest_s']:.1f}, idle_s {event['idle_s']:.1f}" if late else None

    def restart(event: dict) -> str | None:
        return event["error"] if event["event"] == "restart" else None

    def start(event: dict) -> str | None:
        again = event["event"] == "run_start" and event["resumed_from"]
        return f"run_start: start {event['start']}, resumed_from {event['resumed_from']}" if again else None

    def end(event: dict) -> str | None:
        return f"run_end: {event['status']}" if event["event"] == "run_end" else None

    return {"engine slow": slow, "rank kill": restart, "torn event": start, "driver SIGTERM": end}.get(fault, error)


def terminate(folder: Path, process, events: list[dict]) -> bool:
    """SIGTERM to the driver, once it has trained on something and saved it."""
    if not any(event["event"] == "checkpoint" for event in events):
        return False
    (folder / "injected").write_text(str(time.monotonic()))
    os.kill(process.pid, signal.SIGTERM)
    return True


def spoil(fault: str, folder: Path) -> None:
    """Do to the files of a finished run what the fault says."""
    events = folder / "run/events.jsonl"
    if fault == "torn event":
        with open(events, "ab") as file:
            file.write(b'{"event": "metrics", "time": 17')
    elif fault == "damaged event":
        lines = events.read_bytes().splitlines(keepends=True)
        events.write_bytes(b"".join([lines[0], lines[1][:20] + b"\n", *lines[2:]]))
    else:
        for file in (folder / f"run/checkpoints/iter_{FIRST:07d}").glob("*.distcp"):
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 16
            file.write_bytes(data)
    (folder / "injected").write_text(str(time.monotonic()))


def tainted(folder: Path, max_lag: int) -> tuple[int, list[str]]:
    """How many samples got into a batch; and which of them the healthy engine did not draw so, or are too old."""
    drawn: dict[str, list[dict]] = {}
    notes = folder / "drawn.jsonl"
    for line in notes.read_text().splitlines() if notes.exists() else ():
        answer = json.loads(line)
        drawn.setdefault(answer["id"], []).append(answer)
    count, found = 0, []
    for path in sorted((folder / "run/debug").glob("*.safetensors")):
        batch = load_batch(str(path), 0)
        for sample in batch.samples:
            count += 1
            held = {"tokens": sample.tokens[-sample.response_length:].tolist(),
                    "log_probs": sample.columns["rollout_log_probs"].tolist(),
                    "versions": sample.columns["versions"].tolist()}
            answers = drawn.get(f"train-{sample.prompt.uid}-{sample.index}", [])
            if not any(all(answer[key] == held[key] for key in held) for answer in answers):
                found.append(f"rollout {batch.rollout_id}: {sample.name} is not what the engine drew")
            elif not batch.version - max_lag <= min(held["versions"]) <= max(held["versions"]) <= batch.version:
                found.append(f"rollout {batch.rollout_id}: {sample.name} is of versions {held['versions']}")
            elif not np.isfinite(sample.reward):
                found.append(f"rollout {batch.rollout_id}: {sample.name} has reward {sample.reward}")
    return count, found


class Matrix:
    """Runs cells in a folder each; the undisturbed run at --max-lag 0 is what recovered ones are compared with."""

    def __init__(self, path: Path, run_file: Path):
        self.path = path
        common = [run_file, "--plugin", Path(__file__).with_name("faulty.py"), "--threads", "1", "--save-interval", "1",
                  "--save-debug-rollout-data", "run/debug/{rollout_id}.safetensors", "--engine", "faulty"]
        self.course = KillResume(path, common, rollouts=ROLLOUTS)
        self.course.start("reference", "--plan")  # the first command waits until the fork server has done its imports
        self.reference = self.course.finish("reference")

    def cell(self, name: str, mode: str, before=apart) -> Cell:
        """Let one fault happen in one mode; `before` takes the folder, in the command's process."""
        fault, folder, lag = FAULTS[name], self.path / f"{name}-{mode}-{before.__name__}".replace(" ", "-"), MODES[mode]
        folder.mkdir()
        flags = [*fault.flags, "--faulty.fault", name, "--max-lag", lag]
        resumes = name in ("corrupted checkpoint", "torn event", "damaged event")
        if resumes:
            good = self.course.start(folder.name, *flags, "--num-rollout", FIRST)
            assert good.code == 0, good.err
            spoil(name, folder)
        act = partial(terminate, folder) if name == "driver SIGTERM" else lambda process, events: True
        watch = Watch(folder / "run", tells_of(name), act)
        outcome = self.course.start(folder.name, *flags, before=partial(before, folder), while_running=watch)
        told, said = watch.told or (watch.ended, "")
        said = said if fault.end in ("completed",) else outcome.err
        injected = folder / "injected"
        seconds = told - float(injected.read_text()) if injected.exists() else float("nan")
        count, taints = tainted(folder, lag)
        problems = [*self.ending(fault, outcome, folder, lag, 1 + resumes), *taints]
        problems += [f"a process is left: {line}" for line in left_of(watch.pid)]
        problems += [f"left behind: {path}" for path in kill_resume.leftovers(folder / "run")]
        problems += [f"left behind: {path}" for path in (folder / "temporary").iterdir()]
        if not seconds <= fault.timeout + SECONDS:
            problems.append(f"seen after {seconds:.1f} s")
        if not re.search(".*".join(map(re.escape, fault.words.split(" ... "))), said, re.DOTALL):
            problems.append(f"{fault.words!r} is not in {said!r}")
        end = fault.end + (", the weights of the undisturbed run" if fault.end == "completed" and lag == 0 else "")
        return Cell(name, mode, seconds, shown(said), end, count, len(taints), problems)

    def ending(self, fault: Fault, outcome: Outcome, folder: Path, lag: int, ends: int) -> Iterator[str]:
        """What is wrong with how it ended."""
        if outcome.code != CODES[fault.end]:
            yield f"exit code {outcome.code}: {outcome.err[-2000:]}"
            return
        if "Traceback" in outcome.out + outcome.err or "never retrieved" in outcome.out + outcome.err:
            yield f"noise: {outcome.out}{outcome.err}"
        if fault.end in ("failed", "refused") and not re.fullmatch(r"Error: .* Fix: .*", outcome.err, re.DOTALL):
            yield f"not a sentence with a remedy: {outcome.err}"
        if fault is FAULTS["damaged event"]:  # nothing can be said in it
            return
        events = list(read(folder / "run/events.jsonl", everything=True))
        status = {"refused": "failed"}.get(fault.end, fault.end)
        if events[-1]["event"] != "run_end" or events[-1]["status"] != status:
            yield f"the record ends with {events[-1]}"
        if fault.end == "completed" and lag == 0:
            yield from kill_resume.problems(folder / "run", self.reference, rollouts=ROLLOUTS, ends=ends)
        elif fault.end == "completed":
            yield from kill_resume.problems_ahead(folder / "run", rollouts=ROLLOUTS, max_lag=lag, ends=ends)


@pytest.fixture(scope="module")
def rows() -> Iterator[dict[tuple[str, str], Cell]]:
    """What was run; with MILES_WRITE_RELIABILITY it becomes the table, once it is whole."""
    found: dict[tuple[str, str], Cell] = {}
    yield found
    if os.environ.get("MILES_WRITE_RELIABILITY") and set(found) == {(name, mode) for name in FAULTS for mode in MODES}:
        write([found[name, mode] for name in FAULTS for mode in MODES], "table", "make reliability")


@pytest.fixture(scope="module")
def matrix(tiny, tmp_path_factory) -> Matrix:
    """The undisturbed run is done."""
    from tests.conftest import DIGITS, RUN_FILE

    path = tmp_path_factory.mktemp("faults")
    (path / "digits.py").write_text(DIGITS)
    (path / "run.toml").write_text(RUN_FILE.format(plugin=path / "digits.py", tiny=tiny, family="qwen3"))
    return Matrix(path, path / "run.toml")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen_named_and_trains_nothing(matrix, rows, name):
    cells = [matrix.cell(name, mode) for mode in MODES]
    for cell in cells:
        print(cell)
        if not cell.problems:
            rows[name, cell.mode] = cell
    assert not (wrong := {cell.mode: cell.problems for cell in cells if cell.problems}), json.dumps(wrong, indent=1)


@pytest.mark.full
@pytest.mark.parametrize(("name", "mode"), [
    ("engine kill", "async"), ("garbage", "one-off"), ("unknown version", "sync"), ("reward NaN", "async"),
    ("partial sync", "one-off"), ("corrupted checkpoint", "sync")])  # fmt: skip
def test_a_sample_of_the_faults(matrix, name, mode):
    cell = matrix.cell(name, mode)
    print(cell)
    assert not cell.problems


def believes(folder: Path) -> None:
    """In the command's process: no answer of an engine is looked at."""
    apart(folder)
    rollout.check_response = lambda *arguments: None


def test_a_run_that_believes_its_engine_would_train_on_what_it_did_not_draw(matrix):
    """The control: without the checks the same cell counts tainted samples."""
    cell = matrix.cell("positive log-probs", "sync", before=believes)
    assert cell.tainted == 1 and "exit code 0: " in cell.problems
