"""The kit of filters: a good one passes, and each check has a filter that it catches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from miles_testing import canned_samples, filter_contract

from miles_core.types import Drop, Group


def spread(group):
    rewards = {sample.reward for sample in group.samples}
    return group if len(rewards) > 1 else Drop("no_spread")


def flat():
    found = canned_samples()[:1]
    return Group(found[0].prompt, found)


def test_a_filter_passes():
    filter_contract(spread, drops=flat, keeps=lambda: Group(flat().prompt, canned_samples()[:2]))


def shortens(group):
    group.samples[0].columns["tokens"] = group.samples[0].tokens[:-1]
    return group


class Moody:
    """Drops every second group."""

    def __init__(self):
        self.asked = 0

    def filter_group(self, group):
        self.asked += 1
        return group if self.asked % 2 else Drop("second")


BROKEN = {
    "not NoneType": lambda group: None,
    "not 'No spread!'": lambda group: Drop("No spread!"),
    "changes tokens, log-probs, versions or the prompt": shortens,
    "a group without samples": lambda group: Group(group.prompt, []),
    "of another prompt": lambda group: Group(replace(group.prompt, uid=99), group.samples),
    "invents samples": lambda group: Group(group.prompt, [replace(group.samples[0], index=99)]),
    "another answer": Moody().filter_group,
}


@pytest.mark.parametrize("words", BROKEN)
def test_a_filter_that_breaks_a_property_is_caught(words):
    with pytest.raises(AssertionError, match=words):
        filter_contract(BROKEN[words])


def test_a_filter_that_keeps_or_drops_what_it_should_not_is_caught():
    with pytest.raises(AssertionError, match="keeps the group that it has to drop"):
        filter_contract(lambda group: group, drops=flat)
    with pytest.raises(AssertionError, match="drops the group that it has to keep"):
        filter_contract(lambda group: Drop("never"), keeps=flat)
