"""What every selection from the buffer, and every keeper of groups that were called back, has to satisfy.

    from miles_testing import buffer_contract

    def test_contract():
        plugin = MyPlugin()
        buffer_contract(unfinished=plugin.unfinished, select=plugin.select_from_buffer)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from miles_core.types import Group, Sample, Status
from miles_testing import sample_inputs
from miles_testing.sample_inputs import canned_samples, empty, grouped


def buffer_contract(*, unfinished: Callable[[Group], Group] | None = None, select: Callable[..., Any] | None = None,
                    samples: Callable[[], list[Sample]] = canned_samples) -> None:
    """Every property that the two hooks have to have; each is left out where it is not given.

    Raises:
        AssertionError: names the property.
    """
    if unfinished is not None:
        for statuses in ((Status.ABORTED,) * 3, (Status.ABORTED, Status.COMPLETED, Status.TRUNCATED)):
            for nothing in (False, True):
                _keeps(unfinished, called_back(samples(), statuses, nothing=nothing))
    if select is not None:
        _selects(select, [group for flat in (samples(),) for group in called_back(flat, (Status.ABORTED,) * 3)])


def called_back(flat: list[Sample], statuses: tuple[Status, ...], *, nothing: bool = False) -> list[Group]:
    """Groups as the run has them when it calls them back.

    Args:
        nothing: the aborted samples had not drawn a token.
    """
    groups = grouped(flat)
    for group in groups:
        for place, (sample, status) in enumerate(zip(list(group.samples), statuses)):
            sample.status, sample.reward, sample.rewards = status, None, {}
            if status is Status.ABORTED:
                sample.metadata["spans"] = 1
                group.samples[place] = empty(sample) if nothing else sample
    return groups


def _keeps(unfinished: Callable[[Group], Group], groups: list[Group]) -> None:
    for group in groups:
        drawn = {sample.index: sample_inputs.drawn([sample]) for sample in group.samples}
        sizes = {sample.index: sample.response_length for sample in group.samples}
        returned = unfinished(group)
        assert isinstance(returned, Group), f"a group comes back, not {type(returned).__name__}"
        assert returned.prompt == group.prompt, "the group is of another prompt"
        for sample in returned.samples:
            assert drawn.get(sample.index) == sample_inputs.drawn([sample]), (
                f"sample {sample.index} has other tokens, log-probs or versions than were drawn")
            assert sample.response_length == sizes[sample.index], f"sample {sample.index} has another length"
            mask = np.asarray(sample.columns["loss_mask"])
            assert mask.shape == (sample.response_length,), "a mask has one number for each response token"
            assert set(np.unique(mask)) <= {0, 1}, "masks are 0 and 1"
        again = unfinished(returned) if returned.samples else returned
        assert len(again.samples) <= len(returned.samples), "called back twice, it has more samples than before"


def _selects(select: Callable[..., Any], groups: list[Group]) -> None:
    wants = len(inspect.signature(select).parameters)
    known = [id(group) for group in groups]
    selected = select(list(groups), *([4] if wants > 1 else []))
    chosen = [id(group) for group in selected]
    assert set(chosen) <= set(known), "what it returns are the groups that it was given, not others or copies"
    assert len(chosen) == len(set(chosen)), "it returns a group twice"
    again = [id(group) for group in select(list(groups), *([4] if wants > 1 else []))]
    assert chosen == again, "the same groups, asked again, come in another order"
    assert list(select([], *([4] if wants > 1 else []))) == [], "of no group, none is selected"
