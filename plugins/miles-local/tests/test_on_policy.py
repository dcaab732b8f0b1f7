"""The check of --true-on-policy-mode tells equal bits from nearly equal ones, and says where."""

import numpy as np
import pytest
from miles_local.on_policy import check_equal

from miles_core.errors import TrainError
from miles_core.types import Prompt, Sample


def sample(index, trainer, engine, mask=None):
    count = len(trainer)
    columns = {
        "tokens": np.arange(3 + count, dtype=np.int32), "log_probs": np.array(trainer, np.float32),
        "rollout_log_probs": np.array(engine, np.float32), "loss_mask": np.array(mask or [1] * count, np.uint8),
    }  # fmt: skip
    return Sample(prompt=Prompt(7, 7, "", (0, 1, 2)), index=index, response_length=count, columns=columns)


def test_equal_bits_pass():
    """Also where untrained tokens differ, and where nothing is trained at all."""
    check_equal([sample(0, [-1.5, -0.25], [-1.5, -0.25]), sample(1, [-1, -2], [-1, -9], [1, 0]), sample(2, [], [])], "")


@pytest.mark.parametrize("wrong", [np.nextafter(np.float32(-0.25), np.float32(0)), np.nan])
@pytest.mark.parametrize("side", [0, 1])
def test_one_unit_in_the_last_place_is_named(wrong, side):
    both = [[-1.5, -0.25, -3], [-1.5, -0.25, -3]]
    both[side][1] = wrong
    with pytest.raises(TrainError) as caught:
        check_equal([sample(0, [-1], [-1]), sample(1, *both)], "an adapter")
    assert caught.value.code == "true-on-policy-log-probs-differ"
    assert caught.value.who == "train prompt 7 (row 7), sample 1"
    assert "1 of 3" in caught.value.what and "token 1" in caught.value.what and "an adapter" in caught.value.fix
