"""What is trained on is distributed as it was sampled: no order and no lag prefers short answers. On virtual time."""

from __future__ import annotations

import math

import numpy as np
import pytest
from miles_testing.clock import run_virtual
from miles_testing.distributions import kolmogorov_smirnov
from miles_testing.toy import FinishOrder, toy_run

from miles_core import rng
from miles_core.loop import train
from miles_core.stages.buffer import Buffer, forget

GROUPS, SEED = 2048, 0


def length(uid, tries=1):
    """Seconds of an answer: Pareto's, of infinite variance; the same whenever the prompt is sampled."""
    return (rng.key(SEED, "length", uid) / 2**64) ** (-1 / 1.2)


def trained_lengths(buffer=Buffer, **flow):
    run = toy_run(rollouts=GROUPS // 16, batch_size=16, duration=length, train=1.0, buffer=buffer, **flow)
    if buffer is not Buffer:
        run.buffer.requeue = forget
    run_virtual(lambda: train(run))
    uids = [group.prompt.uid for batch in run.trainer.batches for group in batch.groups]
    assert len(uids) == GROUPS
    return [length(uid) for uid in uids]


SAMPLED = [length(uid) for uid in range(10**6, 10**6 + 4096)]
"""What the generator draws when nobody chooses among its answers."""


@pytest.mark.parametrize("order", ["started", "window"])
@pytest.mark.parametrize("flow", [{"max_lag": 0}, {"max_lag": 1}, {"max_lag": 3}, {"max_lag": 3, "credit": 8},
                                  {"max_lag": 3, "most_in_flight": 24}], ids=str)
def test_lengths_are_trained_on_as_they_are_sampled(order, flow):
    _, chance = kolmogorov_smirnov(trained_lengths(order=order, **flow), SAMPLED)
    assert chance > 0.05


@pytest.mark.parametrize("max_lag", [1, 3])
def test_a_buffer_that_takes_in_finish_order_fails(max_lag):
    lengths = trained_lengths(FinishOrder, max_lag=max_lag, credit=8)
    distance, chance = kolmogorov_smirnov(lengths, SAMPLED)
    assert chance < 1e-6 and np.mean(lengths) < np.mean(SAMPLED), (distance, chance)


def test_the_test_of_kolmogorov_and_smirnov_against_its_table():
    """Critical values of the limit distribution: 1.3581 at 5 %, 1.6276 at 1 % (Smirnov 1948); and what p is for."""
    for x, chance in ((1.3581, 0.05), (1.6276, 0.01), (0.8276, 0.5)):
        n = 10_000
        shift = round(x * math.sqrt(2 / n) * n)  # two uniform grids, one of them shifted by so many steps
        found = kolmogorov_smirnov(np.arange(n), np.arange(n) + shift)
        assert found == (pytest.approx(shift / n), pytest.approx(chance, rel=0.03))
    draw = np.random.default_rng(0)
    chances = [kolmogorov_smirnov(draw.random(200), draw.random(300))[1] for _ in range(400)]
    assert np.mean(np.array(chances) < 0.1) == pytest.approx(0.1, abs=0.04)
    assert kolmogorov_smirnov([1, 2], [1, 2]) == (0.0, 1.0) and kolmogorov_smirnov([0] * 50, [1] * 50)[1] < 1e-9
