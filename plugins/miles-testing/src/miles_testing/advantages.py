"""What every advantage estimator has to satisfy, whatever its formula.

    from miles_testing import advantage_contract

    def test_contract():
        advantage_contract(MyEstimator().advantage)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from miles_core.stages import advantage as stage
from miles_core.types import Batch, Group, Sample
from miles_testing import sample_inputs
from miles_testing.sample_inputs import canned_samples, grouped

Estimator = Callable[[Batch], Sequence[Any]]
Placed = dict[tuple[int, int], np.ndarray]
"""Advantages by (prompt, index) of their sample."""


def advantage_contract(estimator: Estimator, *, samples: Callable[[], list[Sample]] = canned_samples,
                       across_groups: bool = False) -> None:
    """Every property that an estimator has to have.

    Args:
        samples: gives the answers, new ones each time; those of one prompt are a group.
        across_groups: a group's advantages depend on other groups, as where a whole batch is whitened.

    Raises:
        AssertionError: names the property.
    """
    properties = [one_value_for_each_sample, nothing_drawn_changes, order_does_not_matter, equal_rewards_are_finite]
    for holds in properties if across_groups else [*properties, groups_stand_alone]:
        holds(estimator, samples)


def one_value_for_each_sample(estimator: Estimator, samples: Callable[[], list[Sample]]) -> None:
    """A finite number or [R] array for each of batch.samples, also of one sample and of none."""
    for some in (samples(), samples()[:1], []):
        batch = Batch(0, grouped(some))
        stage.fill(batch, estimator(batch), "in its contract")


def nothing_drawn_changes(estimator: Estimator, samples: Callable[[], list[Sample]]) -> None:
    """Tokens, log-probs, masks and rewards stay as they are."""
    batch = Batch(0, grouped(samples()))
    before = [(sample_inputs.frozen(sample.columns), sample.reward) for sample in batch.samples]
    names = [set(sample.columns) for sample in batch.samples]
    estimator(batch)
    after = [(sample_inputs.frozen({name: sample.columns[name] for name in own}), sample.reward)
             for sample, own in zip(batch.samples, names)]
    assert before == after, "an estimator changes no column and no reward of a sample; work on copies"


def order_does_not_matter(estimator: Estimator, samples: Callable[[], list[Sample]]) -> None:
    """Groups in another order have the same advantages."""
    groups = grouped(samples())
    _same(_by_sample(estimator, groups), _by_sample(estimator, groups[::-1]), "the order of the groups matters")


def groups_stand_alone(estimator: Estimator, samples: Callable[[], list[Sample]]) -> None:
    """A group's advantages are the same whatever else is in the batch."""
    groups = grouped(samples())
    alone = {name: value for group in groups for name, value in _by_sample(estimator, [group]).items()}
    _same(_by_sample(estimator, groups), alone, "a group's advantages depend on other groups (across_groups=True)")


def equal_rewards_are_finite(estimator: Estimator, samples: Callable[[], list[Sample]]) -> None:
    """A group whose answers all score the same has finite advantages: its deviation is 0."""
    flat = samples()
    for sample in flat:
        sample.reward = 1.0
    batch = Batch(0, grouped(flat))
    stage.fill(batch, estimator(batch), "in its contract, all rewards equal")


def _by_sample(estimator: Estimator, groups: Sequence[Group]) -> Placed:
    batch = Batch(0, list(groups))
    return {(sample.prompt.uid, sample.index): np.broadcast_to(np.asarray(value, float), (sample.response_length,))
            for sample, value in zip(batch.samples, estimator(batch), strict=True)}


def _same(one: Placed, other: Placed, what: str) -> None:
    for name, value in one.items():
        np.testing.assert_allclose(other[name], value, rtol=1e-6, atol=1e-9, err_msg=what)
