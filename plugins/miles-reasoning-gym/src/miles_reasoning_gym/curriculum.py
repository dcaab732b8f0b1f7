"""Levels that move with accuracy.

A task's level is judged when so many answers to its problems were scored at it: up where their mean score is high, down
where it is low. Levels move between rollouts alone, and groups are counted by their number, whatever finished first: at
max_lag 0 the same run has the same levels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Curriculum:
    """The level of every task that has one.

    Args:
        levels: task -> level.
        up, down: mean scores from which, and to which, the level moves.
        answers: after which it is judged.
        most: task -> highest level; filled in when problems are first asked for.
        counted: task -> (sum of scores, answers) at its level.
    """

    levels: dict[str, int]
    up: float
    down: float
    answers: int
    most: dict[str, int] = field(default_factory=dict)
    counted: dict[str, list[float]] = field(default_factory=dict)
    _waiting: dict[int, tuple[str, int, list[float]]] = field(default_factory=dict)

    def scored(self, uid: int, task: str, level: int, scores: list[float]) -> None:
        """The answers to a prompt, also of a group that is dropped later."""
        self._waiting[uid] = (task, level, scores)

    def end_of_rollout(self, last: int) -> None:
        """Count the prompts up to the last one that is trained on, and move. What was begun beyond it comes again."""
        for uid in sorted(uid for uid in self._waiting if uid <= last):
            task, level, scores = self._waiting.pop(uid)
            if level == self.levels.get(task):
                total, count = self.counted.get(task, [0.0, 0])
                self.counted[task] = [total + sum(scores), count + len(scores)]
        for task, (total, count) in list(self.counted.items()):
            if count >= self.answers:
                move = (total / count >= self.up) - (total / count <= self.down)
                self.levels[task] = max(0, min(self.levels[task] + move, self.most.get(task, 0)))
                del self.counted[task]

    def state_dict(self) -> dict[str, Any]:
        """JSON. What was scored and not counted yet may lie in the run's buffer, finished: nobody scores it again."""
        waiting = [[uid, *scored] for uid, scored in sorted(self._waiting.items())]
        return {"levels": dict(self.levels), "counted": dict(self.counted), "waiting": waiting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Tasks that were not there keep the level that they begin with."""
        self.levels |= {task: level for task, level in state["levels"].items() if task in self.levels}
        self.counted = {task: list(counted) for task, counted in state["counted"].items() if task in self.levels}
        self._waiting = {uid: (task, level, scores) for uid, task, level, scores in state.get("waiting", ())}
