import functools

from miles_reasoning_gym import problems
from miles_reasoning_gym.problems import Task
from miles_testing import canned_samples, plugin_contract

ASKED = {"task": "chain_sum", "config": "{}", "level": 0, "number": 7}


@functools.cache
def answer():
    """Drawn once: each role that ends, ends the processes that draw."""
    return problems.draw(Task("chain_sum"), 0, 7)["answer"]


def samples():
    """Answers to a problem of the plugin's."""
    return canned_samples(row={"reasoning_gym": ASKED | {"answer": answer()}})


TestContract = plugin_contract("reasoning-gym", options={"tasks": ["chain_sum"]}, samples=samples)
