"""Unfinished groups are dropped with the status as reason and reach no filter; the others are the chain's to judge."""

import pytest
from miles_testing.toy import toy_group

from miles_core.stages.filter import filter_group
from miles_core.types import Drop, Prompt, Status


@pytest.mark.parametrize("status", [Status.ABORTED, Status.FAILED, Status.PENDING])
def test_an_unfinished_sample_drops_its_group(status):
    group = toy_group(Prompt(4, 4, "", (1,)), 1, reward=0.0)
    group.samples[1].status = status
    drop = filter_group(group, lambda group: pytest.fail("a filter saw it"))
    assert isinstance(drop, Drop) and drop.reason == str(status) and "prompt 4" in drop.detail


def test_finished_groups_are_the_chains():
    group = toy_group(Prompt(4, 4, "", (1,)), 1)
    group.samples[0].status = Status.TRUNCATED
    assert filter_group(group, None) is group
    assert filter_group(group, lambda one: Drop("dull")) == Drop("dull")
