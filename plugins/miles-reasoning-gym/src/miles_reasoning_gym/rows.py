"""Rows of evaluation sets: TASK.gym@[a:b] are problems a to b - 1 of a task, TASK:LEVEL.gym those of a level."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from miles_core.reading import sliced
from miles_reasoning_gym import catalogue, problems
from miles_reasoning_gym.problems import Task
from miles_reasoning_gym.source import row


class GymRows(list[dict[str, Any]]):
    """The problems that a path names, all of them drawn.

    Args:
        path: with a slice.
        task: with the level that is meant.
        keys, prompt: see `source.row`.
        most: bytes that are enough; None draws all.
    """

    def __init__(self, path: str, task: Task, keys: tuple[Sequence[str], Sequence[str]], prompt: str,
                 most: int | None):
        self._name, part = sliced(path)
        self._numbers = range(part.start or 0, part.stop)
        self.total: int | None = len(self._numbers)
        left = most
        super().__init__()
        for index in self._numbers:
            if left is not None and left <= 0:
                break
            self.append(row(keys, prompt, task, task.level, problems.HALF + index))
            left = None if left is None else left - len(str(self[-1]))
        made_of = [catalogue.version(), prompt, path, task.config, task.level]
        self.data = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:16] if most is None else ""

    def where(self, row: int) -> str:
        return f"{self._name}, problem {self._numbers[row]}"
