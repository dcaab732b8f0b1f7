"""The kit of buffers: good hooks pass, and each check has a hook that it catches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from miles_testing import buffer_contract

from miles_core.types import Group


def test_keepers_and_selections_pass():
    buffer_contract(unfinished=lambda group: group, select=lambda groups, rollout_id: groups[::-1])


def changing(change):
    """A keeper that changes every sample."""

    def unfinished(group):
        for sample in group.samples:
            change(sample)
        return group

    return unfinished


def cuts(sample):
    sample.columns["versions"] = sample.columns["versions"][:-1]


def shrinks(sample):
    sample.response_length = sample.response_length // 2
    sample.columns["loss_mask"] = np.ones(sample.response_length)


def masks(mask):
    """A change of the mask: (length) -> mask."""
    return changing(lambda sample: sample.columns.update(loss_mask=mask(sample.response_length)))


class Moody:
    """Answers otherwise every second time."""

    def __init__(self):
        self.asked = 0

    def grows(self, group):
        self.asked += 1
        return replace(group, samples=group.samples * (2 - self.asked % 2))

    def turns(self, groups):
        self.asked += 1
        return groups[:: 1 if self.asked % 2 else -1]


KEEPERS = {
    "a group comes back, not NoneType": lambda group: None,
    "the group is of another prompt": lambda group: replace(group, prompt=replace(group.prompt, uid=99)),
    "other tokens, log-probs or versions": changing(cuts),
    "has another length": changing(shrinks),
    "masks are 0 and 1": masks(lambda length: np.full(length, 0.5)),
    "a mask has one number for each": masks(lambda length: np.ones(length + 1)),
    "more samples than before": Moody().grows,
}
SELECTIONS = {
    "not others or copies": lambda groups: [Group(group.prompt, []) for group in groups],
    "returns a group twice": lambda groups: [*groups, *groups],
    "come in another order": Moody().turns,
    "of no group, none is selected": lambda groups: groups or [1],
}


@pytest.mark.parametrize("words", KEEPERS)
def test_a_keeper_that_breaks_a_property_is_caught(words):
    with pytest.raises(AssertionError, match=words):
        buffer_contract(unfinished=KEEPERS[words])


@pytest.mark.parametrize("words", SELECTIONS)
def test_a_selection_that_breaks_a_property_is_caught(words):
    with pytest.raises(AssertionError, match=words):
        buffer_contract(select=SELECTIONS[words])
