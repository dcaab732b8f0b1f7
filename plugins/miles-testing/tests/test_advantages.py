"""The kit of advantage estimators: good ones pass, and each check has an estimator that it catches."""

from __future__ import annotations

import numpy as np
import pytest
from miles_grpo.advantage import group_relative
from miles_testing import advantage_contract

from miles_core.config.tables import Algorithm
from miles_core.errors import MilesError


def relative(batch):
    return group_relative(batch, Algorithm())


def whitened(batch):
    values = [sample.reward for sample in batch.samples]
    return [value - sum(values) / len(values) for value in values]


def test_estimators_of_a_group_and_of_a_batch_pass():
    advantage_contract(relative)
    advantage_contract(whitened, across_groups=True)


def greedy(batch):
    for sample in batch.samples:
        sample.reward = 0.0
    return relative(batch)


def scaled(batch):
    values = relative(batch)
    with np.errstate(all="ignore"):
        return [value / np.std([s.reward for s in batch.samples]) for value in values] if len(values) > 1 else values


BROKEN = {
    "'in its contract' returned 5 values for 6 samples": lambda batch: relative(batch)[1:],
    "changes no column and no reward": greedy,
    "the order of the groups matters": lambda batch: [float(place) for place, _ in enumerate(batch.samples)],
    "'in its contract, all rewards equal'": scaled,
    "depend on other groups": whitened,
}


@pytest.mark.parametrize("words", BROKEN)
def test_an_estimator_that_breaks_a_property_is_caught(words):
    with pytest.raises((AssertionError, MilesError), match=words):
        advantage_contract(BROKEN[words])
