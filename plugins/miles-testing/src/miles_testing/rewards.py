"""What every scorer has to satisfy.

    from miles_testing import reward_contract

    def test_contract():
        reward_contract(MyScorer().score, right={"\\boxed{4}": 1.0, "5": 0.0}, label="4")
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from miles_core.stages.reward import Scoring
from miles_core.types import Group, Prompt, Sample
from miles_testing import sample_inputs
from miles_testing.sample_inputs import canned_samples, empty, grouped


def reward_contract(scorer: Callable[..., Any], *, right: Mapping[str, float] | None = None, label: str | None = None,
                    samples: Callable[[], list[Sample]] = canned_samples, tolerance: float = 1e-9) -> None:
    """Every property that a scorer has to have, called as the core calls it.

    Args:
        scorer: takes `sample` and gives a number, or `samples`, a whole group, and gives a list; plain or async.
        right: answer -> what it has to score.
        label: ground truth of those answers.
        samples: gives further answers, new ones each time; those of one prompt are a group.

    Raises:
        AssertionError, RewardError: names what is wrong.
    """
    groups = [*grouped(samples()), *(Group(group.prompt, [empty(group.samples[0])]) for group in grouped(samples()))]
    before = [_scored(group) for group in groups]
    scores = asyncio.run(_side_by_side(scorer, groups))
    after = [_scored(group) for group in groups]
    for group, one, other in zip(groups, before, after):
        assert _kept(one, other), f"scoring changes {group.samples[0].name}: its columns, text, reward or status"
    again = asyncio.run(_in_turn(scorer, groups))
    assert scores == again, f"scored side by side {scores}, and one after the other {again}"
    if "samples" not in inspect.signature(scorer).parameters:
        alone = asyncio.run(_in_turn(scorer, [Group(g.prompt, [s]) for g in groups for s in g.samples]))
        one, other = ([number for group in each for number in group] for each in (scores, alone))
        assert one == other, f"a sample's score depends on others: {one} together, {other} alone"
    for text, wanted in (right or {}).items():
        prompt = Prompt(9, 9, "", tuple(b"?"), label)
        sample = sample_inputs._sample(prompt, 0, text, 0.0)
        (got,), = asyncio.run(_in_turn(scorer, [Group(prompt, [sample])]))
        assert abs(got - wanted) <= tolerance, f"{text!r} for label {label!r} scores {got}, and should {wanted}"


async def _side_by_side(scorer: Callable[..., Any], groups: list[Group]) -> list[list[float]]:
    return list(await asyncio.gather(*(_score(scorer, group) for group in groups)))


async def _in_turn(scorer: Callable[..., Any], groups: list[Group]) -> list[list[float]]:
    return [await _score(scorer, group) for group in groups]


def _scored(group: Group) -> object:
    """What scoring may not change."""
    return sample_inputs.frozen([(s.columns, s.text, s.reward, s.status) for s in group.samples])


async def _score(scorer: Callable[..., Any], group: Group) -> list[float]:
    """By the core's own stage, which refuses what is no finite number."""
    before = [(sample.reward, dict(sample.rewards)) for sample in group.samples]
    await Scoring({"scorer": scorer}, {"scorer": 1.0}, lambda sample, weights: sample.rewards["scorer"], 60.0)(group)
    scores = [sample.rewards["scorer"] for sample in group.samples]
    for sample, (reward, rewards) in zip(group.samples, before):
        sample.reward, sample.rewards = reward, rewards
    return scores


def _kept(before: object, after: object) -> bool:
    """Everything that was there is there, and the same; a scorer may add columns that its plugin declares."""
    if isinstance(before, tuple) and isinstance(after, tuple) and before[:1] == after[:1] == ("mapping",):
        return set(before[1]) <= set(after[1])
    if isinstance(before, tuple) and isinstance(after, tuple):
        return len(before) == len(after) and all(map(_kept, before, after))
    return before == after
