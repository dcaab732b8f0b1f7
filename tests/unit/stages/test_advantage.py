"""Numbers of an estimator become a column, and unsuitable answers are refused by name."""

import numpy as np
import pytest

from miles_core.errors import TrainError
from miles_core.stages.advantage import fill
from miles_core.testing.toy import toy_group
from miles_core.types import Batch, Prompt


def batch():
    return Batch(0, [toy_group(Prompt(uid, uid, "", (1, 2)), 1) for uid in range(2)])


def test_numbers_are_spread_and_arrays_are_taken_as_they_are():
    made = batch()
    made.samples[1].columns["loss_mask"] = np.array([0, 1], np.uint8)
    metrics = fill(made, [1.0, np.array([9.0, 2.0]), -1, 0.5], "mine")
    assert [s.columns["advantages"].tolist() for s in made.samples] == [[1, 1], [9, 2], [-1, -1], [0.5, 0.5]]
    assert all(s.columns["advantages"].dtype == np.float32 for s in made.samples)
    assert metrics == {"rollout/advantages": pytest.approx((1 + 1 + 2 - 2 + 1) / 7)}


@pytest.mark.parametrize("values", [[1.0], [1.0, 2.0, 3.0, np.ones(3)], [1.0, float("nan"), 1.0, 1.0]])
def test_the_wrong_count_length_or_number_names_the_estimator(values):
    with pytest.raises(TrainError, match="'mine'"):
        fill(batch(), values, "mine")
