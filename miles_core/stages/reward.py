"""Stage 3, reward: named scorers write sample.rewards[name], and one number comes out of them.

A scorer that raises, hangs or gives no finite number ends the run with its name: a failure is never a zero reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from miles_core.columns import read_only
from miles_core.errors import ColumnError, RewardError
from miles_core.hosts import in_daemon_thread
from miles_core.types import LARGEST_REWARD, Group, Sample
from miles_core.waits import within


class Scoring:
    """The run's scorers.

    Args:
        scorers: name -> implementation, which takes `sample` and returns a number, or takes `samples`, a whole group,
            and returns a list; plain or async.
        weights: name -> weight.
        combine: (sample, weights) -> reward.
        timeout: seconds that one scorer may take for one group.
        key: of a dict, which a scorer may give for a number, the reward; its other numbers are figures of the sample.
    """

    def __init__(self, scorers: Mapping[str, Callable[..., Any]], weights: Mapping[str, float],
                 combine: Callable[..., Any], timeout: float, key: str = "score"):
        self._scorers, self._weights, self._combine, self._timeout = dict(scorers), dict(weights), combine, timeout
        self._key = key

    async def __call__(self, group: Group) -> Group:
        """Score every sample of a group.

        Raises:
            RewardError: names the scorer and the sample.
            ColumnError: a scorer changes what is trained on.
        """
        for name, scorer in self._scorers.items():
            for sample, value in zip(group.samples, await self._ask(name, scorer, group.samples), strict=True):
                sample.rewards[name] = finite(name, sample, self._picked(name, sample, value))
        with read_only(group.samples, getattr(self._combine, "who", "combine_rewards")):
            for sample in group.samples if self._scorers else ():
                sample.reward = finite("combine_rewards", sample, self._combine(sample, self._weights))
        for sample in group.samples:
            if sample.reward is None:
                raise RewardError(f"{sample.name} has no reward", code="sample-not-scored",
                                  fix="name a scorer with --rm-type, or let the generator set sample.reward")
        return group

    def _picked(self, name: str, sample: Sample, value: object) -> object:
        """A number, or of a dict the one that is the reward; its others become figures of the sample."""
        if not isinstance(value, Mapping):
            return value
        if self._key not in value:
            raise RewardError(f"scorer {name!r} gave {sample.name} a dict without {self._key!r}",
                              code="reward-key-missing", got=", ".join(map(str, value)) or "an empty one",
                              fix="name the key of the reward with --reward-key")
        sample.metadata["figures"] = sample.metadata.get("figures", {}) | {
            f"reward/{name}/{key}": float(one) for key, one in value.items()
            if key != self._key and isinstance(one, Real) and one <= LARGEST_REWARD and not one < -LARGEST_REWARD}
        return value[self._key]

    async def _ask(self, name: str, scorer: Callable[..., Any], samples: Sequence[Sample]) -> list[object]:
        whole = "samples" in inspect.signature(scorer).parameters
        answers: Any

        def called() -> list[Any]:
            return [scorer(samples)] if whole else [scorer(sample) for sample in samples]

        def late() -> RewardError:
            return RewardError(f"scorer {name!r} took longer than {self._timeout:g} s for {samples[0].prompt.stream} "
                               f"prompt {samples[0].prompt.uid}", code="scorer-timeout",
                               fix="make the scorer faster, or raise --rm-timeout")

        try:
            with read_only(samples, getattr(scorer, "who", f"scorer {name!r}")):
                async with within(self._timeout, late):
                    if inspect.iscoroutinefunction(scorer):
                        answers = list(await asyncio.gather(*called()))
                    else:
                        answers = await in_daemon_thread(called)
        except (RewardError, ColumnError):
            raise
        except Exception as error:
            raise RewardError(f"scorer {name!r} failed on {samples[0].prompt.stream} prompt {samples[0].prompt.uid} "
                              f"(row {samples[0].prompt.row})", code="scorer-failed",
                              got=f"{type(error).__name__}: {error}",
                              fix="correct the scorer; a failure does not count as a reward of 0") from error
        answers = answers[0] if whole else answers
        if not isinstance(answers, Sequence) or len(answers) != len(samples):
            raise RewardError(f"scorer {name!r} should return one number for each of {len(samples)} samples",
                              code="scores-count", got=repr(answers),
                              fix="return a list as long as `samples`, in its order")
        return list(answers)


def weighted_sum(sample: Sample, weights: Mapping[str, float]) -> float:
    """The default of `combine_rewards`."""
    return sum(weights[name] * value for name, value in sample.rewards.items() if name in weights)


def finite(name: str, sample: Sample, value: object) -> float:
    """What a scorer gave a sample, as a number. Raises RewardError where it is none, or not a finite float32."""
    with contextlib.suppress(Exception):  # an integer beyond all floats, or what an object of the scorer's does
        if hasattr(value, "__float__") and abs(number := float(value)) <= LARGEST_REWARD:
            return number
    try:
        got = repr(value)[:200]
    except Exception:  # noqa: BLE001 - an integer of too many digits
        got = f"{type(value).__name__} that cannot be printed"
    raise RewardError(f"scorer {name!r} did not return a finite float32 for {sample.name}", code="score-not-finite",
                      got=got, fix="return a finite float for every sample")
