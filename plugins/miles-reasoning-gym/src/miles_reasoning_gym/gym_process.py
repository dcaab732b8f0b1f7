"""The program of a process that has reasoning_gym: problems, scores, and how far a curriculum goes, each as JSON.

Some tasks walk through sets of strings, so Python's hashes are fixed here: a problem is a function of what is asked.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from miles_math.answer import boxed_answer, without_end_tokens
from miles_math.serving import serve

CHUNK = 500
"""Problems of one seed; the next ones have the next seed but 499, as some tasks have no more than their size."""


@functools.lru_cache(16)
def dataset(task: str, config: str, level: int | None, seed: int) -> Any:
    """A task's problems seed .. seed + CHUNK - 1.

    Args:
        config: of the task, as JSON.
        level: of its curriculum; None without.
    """
    from reasoning_gym.factory import DATASETS, create_dataset

    values = json.loads(config) | {"seed": seed, "size": CHUNK}
    if level is None:
        return create_dataset(task, **values)
    curriculum = _curriculum(task)
    curriculum.set_global_level(level)
    return DATASETS[task][0](curriculum.generate_configuration(values))


@functools.lru_cache(256)
def entry(task: str, config: str, level: int | None, number: int) -> tuple[Any, dict[str, Any]]:
    """The dataset and problem of a number: what reasoning_gym draws from Random(number)."""
    first = number - number % CHUNK
    problems = dataset(task, config, level, first)
    return problems, problems[number - first]


def draw(task: str, config: str, level: int | None, number: int) -> dict[str, object]:
    """A problem; of its metadata what is a text or number."""
    _, one = entry(task, config, level, number)
    fields = {key: value for key, value in one["metadata"].items() if isinstance(value, str | int | float)}
    return {"question": str(one["question"]), "answer": _text(one["answer"]), "fields": fields}


def score(task: str, config: str, level: int | None, number: int, answer: str, where: str, response: str,
          ) -> dict[str, object]:
    """What the task gives a response; no score where the problem is not the one with that answer.

    Args:
        where: its answer stands: "tag", "boxed" or "text".
    """
    from reasoning_gym.utils import extract_answer

    problems, one = entry(task, config, level, number)
    if _text(one["answer"]) != answer:
        return {"now": _text(one["answer"])}
    words = {"tag": extract_answer, "boxed": boxed_answer, "text": without_end_tokens}[where](response)
    return {"score": float(problems.score_answer(words, one))}


def levels(task: str) -> dict[str, object]:
    """How many a curriculum has, and which keys of the configuration it sets."""
    attributes = list(_curriculum(task).attributes.values())
    names = ("field_name", "lower_field_name", "upper_field_name")
    return {"levels": max(len(one.levels) for one in attributes),
            "keys": [key for one in attributes for name in names if (key := getattr(one, name, None))]}


def told(question: dict[str, Any]) -> str:
    """One line for a question: what its function returns, or what a task raised."""
    do: dict[str, Callable[..., object]] = {"draw": draw, "score": score, "levels": levels}
    question.pop("seconds")
    try:
        return json.dumps(do[question.pop("do")](**question))
    except Exception as error:  # noqa: BLE001 - a task raises anything, of its configuration as of an answer
        return json.dumps({"error": f"{type(error).__name__}: {error}"[:300]})


def _curriculum(task: str) -> Any:
    from reasoning_gym.factory import create_curriculum

    return create_curriculum(task)


def _text(given: object) -> str:
    return "" if given is None else str(given)


def warm_up() -> None:
    """Import the package."""
    import reasoning_gym  # noqa: F401


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, "-P", __file__], os.environ | {"PYTHONHASHSEED": "0"})
    serve(told, warm_up)
