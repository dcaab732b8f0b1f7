"""Filters of groups, as Miles ships them, and what filters answer with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from miles_compat.sample import Sample


@dataclass
class DynamicFilterOutput:
    """Whether a group is trained on, and the word under which it is counted otherwise."""

    keep: bool
    reason: str | None = None


class MetricGatherer:
    """Counts groups that were dropped, by reason."""

    def __init__(self) -> None:
        self._dropped: Counter[str] = Counter()

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        """One more."""
        if reason:
            self._dropped[reason] += 1

    def collect(self) -> dict[str, int]:
        """Figures by Miles's names."""
        return {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in self._dropped.items()}


def call_dynamic_filter(function: Callable[..., Any] | None, *arguments: object, **named: object) -> Any:
    """What a filter answers as a DynamicFilterOutput; without a filter every group is kept."""
    answer = True if function is None else function(*arguments, **named)
    return answer if hasattr(answer, "keep") else DynamicFilterOutput(answer)


def check_reward_nonzero_std(args: object, samples: Sequence[Any], **kwargs: object) -> DynamicFilterOutput:
    """Keeps groups whose rewards differ."""
    from statistics import pstdev

    rewards = [float(sample.get_reward_value(args)) for sample in flat(samples)]
    keep = pstdev(rewards) > 1e-8
    return DynamicFilterOutput(keep, None if keep else f"zero_std_{round(rewards[0], 1)}")


def check_no_aborted(args: object, samples: Sequence[Any], **kwargs: object) -> DynamicFilterOutput:
    """Keeps groups that were finished."""
    keep = all(sample.status != Sample.Status.ABORTED for sample in flat(samples))
    return DynamicFilterOutput(keep, None if keep else "group_has_aborted")


def flat(samples: Iterable[Any]) -> list[Any]:
    """Samples of a group in which one execution may be a list of them."""
    return [one for sample in samples for one in (sample if isinstance(sample, list) else [sample])]
