"""Rows of NAME.verifiers@[a:b]: the tasks a to b - 1 of an environment's taskset."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from miles_core.errors import DataError
from miles_core.reading import reading, sliced
from miles_verifiers.names import environment_of

if TYPE_CHECKING:
    import verifiers.v1 as vf


class TaskRows(list[dict[str, Any]]):
    """The tasks that a path names.

    Args:
        path: with a slice, which a taskset without an end needs.
        env: the environment.
        table: it as the run describes it.
        keys: of prompts, and of labels.
        template: prompts are messages for a chat template, otherwise their text.

    Raises:
        DataError: the taskset cannot be read, or has no end and the slice none either.
    """

    total: int | None = None

    def __init__(self, path: str, env: vf.Env, table: Mapping[str, Any], keys: tuple[Sequence[str], Sequence[str]],
                 template: bool):
        super().__init__()
        self._name, part = sliced(path)
        taskset, self.tasks = env.taskset, list["vf.Task"]()
        if part.stop is not None and part.stop >= 0:
            taskset = taskset.take(part.stop)
        if not taskset.bounded:
            raise DataError("the taskset has no end", code="verifiers-taskset-endless", who=path,
                            fix=f"say which of its tasks: {self._name}@[0:1000]")
        with reading(path):
            self.tasks = list(taskset)[part]
        made_of = hashlib.sha256(json.dumps(table, sort_keys=True, default=str).encode())
        for index, task in enumerate(self.tasks):
            made_of.update(task.hash.encode())
            self.append({**dict.fromkeys(keys[1]), **dict.fromkeys(keys[0], _prompt(env, task.data, template)),
                         "verifiers": {"env": environment_of(path), "path": path, "row": index}})
        self.data = made_of.hexdigest()[:16]

    def where(self, row: int) -> str:
        return f"{self._name}, task {self.tasks[row].data.idx}"


def _prompt(env: vf.Env, data: vf.TaskData, template: bool) -> Any:
    """What the policy sees first, as far as the task alone says it: a harness may add to it."""
    text = data.prompt_text or data.description or data.name or f"task {data.idx}"
    if not template:
        return text
    return messages_of(data.system_prompt, text if data.prompt is None else data.prompt)


def messages_of(system: str | None, prompt: Any) -> list[dict[str, Any]]:
    """A conversation's first messages; the prompt is the user's text, or messages of verifiers."""
    from verifiers.v1.dialects.chat import message_to_wire

    messages = [{"role": "system", "content": system}] if system else []
    if isinstance(prompt, str):
        return [*messages, {"role": "user", "content": prompt}]
    return [*messages, *(message_to_wire(message) for message in prompt or ())]
