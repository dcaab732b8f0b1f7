"""Problems by number: a run trains on one half of the seeds and is evaluated on the other, so they share none.

reasoning_gym makes problem i of a dataset with Random(seed + i), so one number stands for both. Seeds do not overlap;
a task with few problems may make the same one of two of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_math.processes import Processes, Ungradable

from miles_core import rng
from miles_core.errors import ConfigError, DataError, RewardError

if TYPE_CHECKING:
    from miles_core.types import Sample

HALF, SEEDS = 2**31, 2**30
"""Numbers are below 2**32, as NumPy wants seeds: of training below HALF, of evaluation above."""
DRAWING = 60.0
"""CPU seconds for a problem."""


@dataclass(frozen=True, slots=True)
class Task:
    """A task of a run.

    Args:
        config: the task's own, as JSON.
        level: of its curriculum at the beginning; None without a curriculum.
    """

    name: str
    weight: float = 1.0
    config: str = "{}"
    level: int | None = None


def number(seed: int, index: int) -> int:
    """The seed of problem `index` of a run's training, below HALF; that of an evaluation is HALF + index."""
    return (rng.key(seed, "reasoning-gym") % SEEDS + index) % HALF


_used: dict[tuple[float, int], Processes] = {}
"""Of this Python process, whoever asks: an import of reasoning_gym takes more than a second."""


def processes(seconds: float, count: int) -> Processes:
    """Those with so many CPU seconds for a question; closed ones start again when they are asked."""
    return _used.setdefault((seconds, count), Processes(
        Path(__file__).with_name("gym_process.py"), seconds, count, who="reasoning-gym",
        fix="import reasoning_gym by hand to see why; pip install reasoning-gym"))


def draw(task: Task, level: int | None, number: int) -> dict[str, Any]:
    """A problem: its question, its answer, and fields of its metadata.

    Raises:
        DataError: the task cannot make it.
    """
    try:
        made = _ask(processes(DRAWING, 1), do="draw", task=task.name, config=task.config, level=level, number=number)
    except Ungradable:
        made = {"error": f"no problem within {DRAWING:g} CPU seconds or 4 GiB"}
    if "error" in made:
        raise DataError(f"task {task.name} cannot make problem {number}", code="reasoning-gym-problem-failed",
                        got=made["error"], who=f"reasoning-gym.tasks, {task.name}",
                        fix="make its config easier, or leave the task out")
    return made


def close() -> None:
    """End the processes that are idle."""
    for one in _used.values():
        one.close()


def asked_of(sample: Sample) -> dict[str, Any]:
    """Which problem a sample answers: task, config, level, number and answer.

    Raises:
        RewardError: its prompt is no problem of reasoning-gym.
    """
    problem = sample.prompt.metadata.get("reasoning_gym")
    if problem is None:
        raise RewardError(f"{sample.name} answers no problem of reasoning-gym", code="reasoning-gym-other-prompt",
                          who="reasoning-gym", fix="take prompts of --prompt-source reasoning-gym or of TASK.gym, or "
                          "another scorer")
    return dict(problem)


def score(using: Processes, problem: Mapping[str, Any], where: str, response: str) -> float:
    """What a task gives a response.

    Args:
        problem: see `asked_of`.
        where: the answer stands: "tag", "boxed" or "text".

    Raises:
        Ungradable: it took too long or too much memory, or the task fails on the answer.
        RewardError: the problem is not the one that was asked.
    """
    reply = _ask(using, do="score", **problem, where=where, response=response)
    if "error" in reply:
        raise Ungradable(reply["error"])
    if "score" not in reply:
        raise RewardError(f"task {problem['task']} makes another problem of {problem['number']} than it did before",
                          code="reasoning-gym-problem-changed",
                          got=f"answer {reply['now']!r}, before {problem['answer']!r}", who="reasoning-gym",
                          fix="use the version of reasoning-gym that made the prompts; a task whose problems do not "
                          "repeat cannot be trained on")
    return float(reply["score"])


def levels(task: Task) -> int:
    """How many the curriculum of a task has.

    Raises:
        ConfigError: its config sets what the curriculum sets.
    """
    reply = _ask(processes(DRAWING, 1), do="levels", task=task.name)
    both = sorted(set(reply["keys"]) & set(json.loads(task.config)))
    if both:
        raise ConfigError(f"the curriculum of {task.name} sets {', '.join(both)}, and so does its config",
                          code="reasoning-gym-key-of-curriculum", who=f"reasoning-gym.tasks, {task.name}",
                          got=", ".join(both), fix="leave it out of config, or the curriculum")
    return int(reply["levels"])


def _ask(using: Processes, **question: object) -> dict[str, Any]:
    return dict(json.loads(using.ask(question)))
