"""Running a recipe: `miles run` in a process of its own for each seed, one after the other, and the curve it wrote."""

from __future__ import annotations

import resource
import shlex
import subprocess
import sys
from pathlib import Path

from miles_core.errors import ConfigError, MilesError
from miles_core.record.events import read
from miles_reproduce.claim import Curve, Preparation

LOG = "output.log"
MILES = [str(Path(sys.executable).with_name("miles"))]


def prepare(one: Preparation, log: Path) -> None:
    """Run the command unless what it makes is there.

    Raises:
        MilesError: it failed, or made something else.
    """
    if one.makes.exists():
        return
    words = shlex.split(one.command)
    words[:1] = {"python": [sys.executable], "miles": MILES}.get(words[0], words[:1])
    _run(words, log, one.command)
    if not one.makes.exists():
        raise MilesError("a recipe's preparation did not make what it should", code="recipe-preparation-empty",
                         got=f"no {one.makes}", who=one.command, fix=f"{log} has its output")


def run(run_file: Path, seed: int, folder: Path) -> float:
    """One run into a folder that does not exist yet; the CPU seconds of it and its processes.

    Raises:
        ConfigError: it exists.
        MilesError: the run failed.
    """
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError("an earlier run lies there", got=str(folder), who="--out", code="recipe-folder-taken",
                          fix="name another folder, or remove it") from None
    before = _cpu_seconds()
    _run([*MILES, "run", str(run_file), "--no-live", f"--seed={seed}", f"--rollout-seed={seed}",
          f"--run-dir={folder / 'run'}"], folder / LOG, f"miles run {run_file} --seed {seed} --rollout-seed {seed}")
    return _cpu_seconds() - before


def curve(folder: Path, metric: str) -> Curve:
    """Finite values of a metric by the rollouts that were trained on before: of an evaluation at rollout k it is k, and
    after rollout k, counted from 0, k + 1.

    Raises:
        ConfigError: the run went on from a checkpoint, so that its seed is not all that it is made of.
    """
    after, events = {"eval": 0, "metrics": 1}, list(read(folder / "run" / "events.jsonl"))
    before = next((event["resumed_from"] for event in events if event["event"] == "run_start"), None)
    if before is not None:
        raise ConfigError("the run went on from a checkpoint", got=f"it began at rollout {before}", who=str(folder),
                          code="recipe-resumes", fix="leave load and save out of the recipe")
    return [(event["rollout_id"] + after[event["event"]], event["metrics"][metric])
            for event in events if event["event"] in after and event["metrics"].get(metric) is not None]


def _run(words: list[str], log: Path, shown: str) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        status = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT).returncode
    if status:
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
        raise MilesError("a command of the recipe failed", code="recipe-command-failed", who=shown,
                         got=f"exit status {status}: {' '.join(last)}", fix=f"{log} has its output")


def _cpu_seconds() -> float:
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime
