"""Reward functions: of a sample, or of a whole group."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from miles_compat.paths import arguments, ready
from miles_compat.sample import lent
from miles_core.hosts import in_daemon_thread
from miles_core.types import Sample

if TYPE_CHECKING:
    from miles_compat.args import Args


async def scores(function: Callable[..., Any], args: Args, samples: Sequence[Sample]) -> list[float]:
    """What the function gives each sample of a group; one whose second argument is named `samples` gets all of them.

    Plain functions run in a thread, like any plain scorer.
    """
    known = [_known(sample, "custom") for sample in samples]
    if None not in known:
        return cast("list[float]", known)
    whole = [one.name for one in arguments(function)][1:2] == ["samples"]
    function = ready(function)
    with lent(samples, scored=True, who="custom_rm_path") as found:
        answers = await asyncio.gather(*(_asked(function, args, one) for one in ([found] if whole else found)))
    return list(answers[0]) if whole else list(answers)


async def _asked(function: Callable[..., Any], args: Args, given: object) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(args, given)
    answer = await in_daemon_thread(lambda: function(args, given))
    return await answer if inspect.isawaitable(answer) else answer


async def given(args: Args, sample: Sample) -> Any:
    """What a rollout function gave a sample as its reward, else what the scorer of --rm-type gives it."""
    from miles_compat import sample as of_miles
    from miles_compat.scorers import async_rm

    if (known := _known(sample, "generated")) is not None:
        return known
    return await async_rm(args, of_miles.seen(sample, 1))


def _known(sample: Sample, scorer: str) -> float | None:
    """The score of a sample that has one: the reward of the function that made it, and where a group went on after it
    was scored, what the scorer gave it then. Its reward is of all scorers, with their weights."""
    return sample.rewards.get(scorer, sample.reward)
