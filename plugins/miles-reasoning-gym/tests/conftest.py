"""Prompts of the source, with a tokenizer of characters."""

from __future__ import annotations

import pytest
from miles_reasoning_gym import problems
from miles_reasoning_gym.curriculum import Curriculum
from miles_reasoning_gym.source import GymPrompts
from miles_reasoning_gym.tasks import tasks_of

from miles_core.stages.prompts import Rows


class Characters:
    """A tokenizer of one token per character."""

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [ord(c) for c in text]}


@pytest.fixture(scope="session", autouse=True)
def ended():
    """No process outlives the tests."""
    yield
    problems.close()


@pytest.fixture
def source():
    """(tasks, **changes) -> the prompt source of a run."""

    def make(tasks, *, seed=0, prompt="{question}", max_prompt_len=None, answers=4):
        made = tasks_of(tasks)
        levels = {task.name: task.level for task in made if task.level is not None}
        rows = Rows("", "input", None, "metadata", 4000, max_prompt_len)
        return GymPrompts(made, Curriculum(levels, 0.8, 0.2, answers), rows, prompt, Characters(), seed=seed, epoch=9)

    return make
