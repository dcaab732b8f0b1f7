"""Environments and rewards that are not as they should be. verifiers finds a class by its module and `__all__`."""

import itertools
import time

import verifiers.v1 as vf
from words_env import CountLetters, Word

__all__ = ["Endless", "Pair"]


class PairConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    critic: vf.AgentConfig = vf.AgentConfig()


class Pair(vf.Env[PairConfig]):
    """Two roles, of which the second says nothing."""

    async def run(self, task, agents):
        await agents.solver.run(task)


class Endless(vf.Taskset[CountLetters, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for number in itertools.count():
            yield CountLetters(Word(prompt=f"How many letters has {'a' * number}?", word="a" * number))


async def broken(trace):
    raise ZeroDivisionError("no scorer")


async def blocking(trace):
    time.sleep(0.5)
    return 1.0
