"""Prompts without end: number n is a function of the run's seed, n, and the level that its task has now."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
from collections import deque
from collections.abc import Sequence
from typing import Any

from miles_core import rng
from miles_core.errors import ConfigError, DataError
from miles_core.stages.prompts import Rendering, Rows
from miles_core.types import Prompt
from miles_reasoning_gym import catalogue, problems
from miles_reasoning_gym.curriculum import Curriculum
from miles_reasoning_gym.problems import Task

MOST_LEFT_OUT = 1000
"""Prompts in a row that may be too long."""


def row(keys: tuple[Sequence[str], Sequence[str]], prompt: str, task: Task, level: int | None, number: int,
        ) -> dict[str, Any]:
    """A problem as a row: the prompt and the answer under their keys, and what its scorer has to know.

    Args:
        keys: of prompts, and of labels.
        prompt: a format of the question and the texts and numbers of the problem's metadata.

    Raises:
        ConfigError: the prompt names something else.
        DataError: the task cannot make the problem.
    """
    made = problems.draw(task, level, number)
    try:
        text = prompt.format(**made["fields"] | {"question": made["question"]})
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError("the prompt names what a problem does not have", code="reasoning-gym-prompt-field",
                          got=f"{type(error).__name__}: {error}", who="reasoning-gym.prompt",
                          fix=f"problems of {task.name} have {', '.join(['question', *made['fields']])}") from None
    problem = {"task": task.name, "config": task.config, "level": level, "number": number}
    return {**dict.fromkeys(keys[0], text), **dict.fromkeys(keys[1], made["answer"]),
            "reasoning_gym": problem | {"answer": made["answer"]}}


class GymPrompts:
    """The prompt source.

    Args:
        rows: how rows become prompts.
        prompt: see `row`.
        epoch: prompts of one.
    """

    def __init__(self, tasks: Sequence[Task], curriculum: Curriculum, rows: Rows, prompt: str, tokenizer: Any, *,
                 seed: int, epoch: int):
        self._tasks, self._curriculum, self._format, self._seed, self._epoch = tasks, curriculum, prompt, seed, epoch
        self._keys = ((rows.input_key,), () if rows.label_key is None else (rows.label_key,))
        self._rendering = Rendering(rows, lambda number: f"reasoning-gym, problem {number}", tokenizer)
        self._bounds = list(itertools.accumulate(task.weight for task in tasks))
        for task in tasks:
            if task.level is not None:
                curriculum.most[task.name] = problems.levels(task) - 1
        made_of = [catalogue.version(), seed, prompt, [[t.name, t.weight, t.config, t.level] for t in tasks]]
        self.data = "reasoning-gym " + hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:16]
        self._next, self._again = 0, deque[int]()

    def __len__(self) -> int:
        return self._epoch

    def next(self) -> Prompt:
        for _ in range(MOST_LEFT_OUT):
            if not self._again:
                self._again.append(self._next)
                self._next += 1
            if (prompt := self._prompt(self._again.popleft())) is not None:
                return prompt
        raise DataError(f"{MOST_LEFT_OUT} problems in a row are longer than the limit", who="reasoning-gym",
                        code="reasoning-gym-all-too-long", fix="raise --rollout-max-prompt-len, or make them easier")

    def give_back(self, prompts: list[Prompt]) -> None:
        self._again.extendleft(prompt.uid for prompt in reversed(prompts))

    def state_dict(self) -> dict[str, Any]:
        following, again = self._next, list(self._again)
        while again and again[-1] == following - 1:  # the same stream; how far sampling got is a matter of timing
            following = again.pop()
        return {"next": following, "again": again, "data": self.data, **self._curriculum.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next, self._again = state["next"], deque(state["again"])
        self._curriculum.load_state_dict(state)

    def _prompt(self, uid: int) -> Prompt | None:
        """None where it is too long."""
        place = rng.key(self._seed, "reasoning-gym/task", uid) / 2**64 * self._bounds[-1]
        task = self._tasks[min(bisect.bisect_right(self._bounds, place), len(self._tasks) - 1)]
        level = self._curriculum.levels.get(task.name)
        record = row(self._keys, self._format, task, level, problems.number(self._seed, uid))
        return self._rendering(uid, uid, record) if self._rendering.fits(uid, record) else None
