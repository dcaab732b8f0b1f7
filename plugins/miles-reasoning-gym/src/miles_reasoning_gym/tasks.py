"""The tasks that a run names, checked against what the installed package has."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from miles_core.errors import ConfigError
from miles_core.reading import parse_json, sliced
from miles_reasoning_gym import catalogue
from miles_reasoning_gym.problems import Task

KEYS = ("name", "weight", "config", "curriculum", "level")
WHO = "reasoning-gym.tasks"


def tasks_of(given: Iterable[Any]) -> list[Task]:
    """Tasks by name, or by a table of KEYS, which a command line gives as JSON.

    Raises:
        ConfigError: no JSON, an unknown task or key, a weight that is none, no such curriculum, a task twice.
    """
    tasks = [_task(_table(one) if isinstance(one, str) else dict(one)) for one in given]
    names = [task.name for task in tasks]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError("a task is named twice", code="reasoning-gym-task-twice", got=twice, who=WHO,
                          fix="give it one weight and one config")
    return tasks


def of_path(path: str, tasks: Sequence[Task]) -> Task:
    """The task of TASK.gym@[a:b] or TASK:LEVEL.gym@[a:b], configured as in `tasks` where it is one of them.

    Raises:
        ConfigError: an unknown task, a level without a curriculum, no slice that says how many problems.
    """
    name, part = sliced(path)
    match = re.fullmatch(r"(\w+?)(?::(\d+))?\.gym", name, re.IGNORECASE)
    if match is None:
        raise ConfigError("an evaluation set of reasoning-gym is TASK.gym or TASK:LEVEL.gym", got=name, who=path,
                          code="reasoning-gym-path", fix="for instance chain_sum.gym@[0:256]")
    _known(match[1], path)
    task = next((one for one in tasks if one.name == match[1]), Task(match[1]))
    start, stop = part.start or 0, part.stop
    if stop is None or not 0 <= start < stop:
        raise ConfigError("a task has problems without end, and the path does not say which", got=path,
                          who=path, code="reasoning-gym-slice", fix=f"{name}@[0:256]")
    return task if match[2] is None else _at_level(task, int(match[2]), path)


def _table(word: str) -> dict[str, Any]:
    if not word.startswith("{"):
        return {"name": word}
    try:
        return dict(parse_json(word))
    except ValueError as error:
        raise ConfigError("a task that begins with { should be a JSON object", code="reasoning-gym-task-not-json",
                          got=word, who=WHO, fix=str(error)) from None


def _task(table: dict[str, Any]) -> Task:
    for key in table.keys() - set(KEYS):
        raise ConfigError("a task has no such key", code="reasoning-gym-task-key", got=key, who=WHO,
                          fix=_near(key, KEYS))
    name, weight, config = str(table.get("name", "")), table.get("weight", 1.0), table.get("config", {})
    known, who = _known(name, WHO), f"{WHO}, {name}"
    if not (isinstance(weight, int | float) and not isinstance(weight, bool) and 0 < weight < float("inf")):
        raise ConfigError("the weight of a task should be a number above 0", code="reasoning-gym-weight", got=weight,
                          who=who, fix="leave the task out, or give it a weight")
    if not isinstance(config, Mapping):
        raise ConfigError("the config of a task should be a table", code="reasoning-gym-config-not-table",
                          got=repr(config), who=who, fix="config = { KEY = VALUE }")
    for key in config.keys() - set(known.keys):
        raise ConfigError(f"{name} has no such configuration", code="reasoning-gym-config-key", got=key, who=who,
                          fix=_near(key, known.keys))
    task = Task(name, float(weight), json.dumps(config, sort_keys=True))
    wanted = table.get("curriculum", "level" in table)
    return _at_level(task, table.get("level", 0), who) if wanted else task


def _at_level(task: Task, level: object, who: str) -> Task:
    if not catalogue.known(task.name).curriculum:
        raise ConfigError("the task has no curriculum", code="reasoning-gym-no-curriculum", got=task.name, who=who,
                          fix="leave curriculum and level out, and set how hard it is in config")
    if not isinstance(level, int) or level < 0:
        raise ConfigError("a level should be a whole number from 0 on", code="reasoning-gym-level", got=repr(level),
                          who=who, fix="level = 0 is the easiest")
    return Task(task.name, task.weight, task.config, level)


def _known(name: str, who: str) -> catalogue.Known:
    if name not in catalogue.names():
        raise ConfigError("reasoning-gym has no such task", code="reasoning-gym-task-unknown", got=repr(name), who=who,
                          fix=_near(name, tuple(catalogue.names())))
    return catalogue.known(name)


def _near(key: str, names: Sequence[str]) -> str:
    """What a message says to do about a name that is not one of these."""
    near = difflib.get_close_matches(key, names, 1, 0.5)
    listed = f"it is one of {', '.join(names)}" if len(names) <= 12 else "the README of miles-reasoning-gym says where"
    return f"did you mean {near[0]}?" if near else listed
