"""The kit of scorers: good ones pass, and each check has a scorer that it catches."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from miles_testing import reward_contract

from miles_core.errors import MilesError


def boxed(sample):
    return float(f"\\boxed{{{sample.prompt.label}}}" in sample.text)


async def ranked(samples):
    order = sorted(sample.response_length for sample in samples)
    return [order.index(sample.response_length) for sample in samples]


def test_scorers_of_samples_and_of_groups_pass():
    reward_contract(boxed, right={"\\boxed{4}": 1.0, "4": 0.0}, label="4")
    reward_contract(ranked)


class Counts:
    """A scorer that remembers."""

    def __init__(self):
        self.seen = 0

    def score(self, sample):
        self.seen += 1
        return float(self.seen)


class Crowd:
    """A scorer that counts who of a group is scored at the same time."""

    def __init__(self):
        self.waiting = Counter()

    async def score(self, sample):
        group = sample.prompt.uid, sample.response_length > 0
        self.waiting[group] += 1
        await asyncio.sleep(0.01)
        found = float(self.waiting[group])
        await asyncio.sleep(0.01)
        self.waiting[group] -= 1
        return found


def marks(sample):
    sample.text += "!"
    return 0.0


BROKEN = {
    "one after the other": Counts().score,
    "scoring changes": marks,
    "did not return a finite float32": lambda sample: float("nan"),
    "depends on others": Crowd().score,
    "division by zero": lambda sample: 1 / sample.response_length,
    "one number for each": lambda samples: [1.0],
}


@pytest.mark.parametrize("words", BROKEN)
def test_a_scorer_that_breaks_a_property_is_caught(words):
    with pytest.raises((AssertionError, MilesError), match=words):
        reward_contract(BROKEN[words])


def test_a_scorer_that_does_not_know_a_right_answer_is_caught():
    with pytest.raises(AssertionError, match="'4' for label '4' scores 0.0, and should 1.0"):
        reward_contract(boxed, right={"4": 1.0}, label="4")
