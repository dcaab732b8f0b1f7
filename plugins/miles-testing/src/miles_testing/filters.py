"""What every filter of groups has to satisfy.

    from miles_testing import filter_contract

    def test_contract():
        filter_contract(MyFilter().filter_group)
"""

from __future__ import annotations

import re
from collections.abc import Callable

from miles_core.types import Drop, Group, Sample
from miles_testing import sample_inputs
from miles_testing.sample_inputs import canned_samples, grouped


def filter_contract(filter_group: Callable[[Group], Group | Drop], *,
                    samples: Callable[[], list[Sample]] = canned_samples, drops: Callable[[], Group] | None = None,
                    keeps: Callable[[], Group] | None = None) -> None:
    """Every property that a filter has to have.

    Args:
        drops, keeps: give a group that it has to drop, and one that it has to keep.

    Raises:
        AssertionError: names the property.
    """
    groups = [*grouped(samples()), *grouped(samples()[:1])]
    for group, same in zip(groups, [*grouped(samples()), *grouped(samples()[:1])]):
        before = list(group.samples)
        drawn = sample_inputs.drawn(before)
        answer = filter_group(group)
        _answers(answer, group, before)
        assert sample_inputs.drawn(before) == drawn, "it changes tokens, log-probs, versions or the prompt of a sample"
        again = sample_inputs.frozen(filter_group(same))
        assert again == sample_inputs.frozen(answer), "the second call on the same group gives another answer"
    if drops is not None:
        assert isinstance(filter_group(drops()), Drop), "it keeps the group that it has to drop"
    if keeps is not None:
        assert isinstance(filter_group(keeps()), Group), "it drops the group that it has to keep"


def _answers(answer: object, group: Group, before: list[Sample]) -> None:
    if isinstance(answer, Drop):
        assert re.fullmatch(r"[a-z0-9_]+", answer.reason), f"a reason is a word that is counted, not {answer.reason!r}"
        return
    assert isinstance(answer, Group), f"a group or a Drop comes back, not {type(answer).__name__}"
    assert answer.prompt is group.prompt or answer.prompt == group.prompt, "the group is of another prompt"
    assert answer.samples, "a group without samples is no group; return Drop(reason)"
    known = {(sample.prompt.uid, sample.index) for sample in before}
    assert {(s.prompt.uid, s.index) for s in answer.samples} <= known, "it invents samples"
