"""What counts as rounding, on tensors made for it."""

import pytest
import torch
from miles_divergence.recording import Tensor
from miles_divergence.rounding import distances

EPSILON = torch.finfo(torch.float32).eps


def tensor(values, numbers=None):
    return Tensor(torch.arange(len(values)) if numbers is None else torch.tensor(numbers), values, (0, 0))


def compared(a, b, noisy=None, **more):
    return distances(a, b, noisy, EPSILON, lambda numbers: torch.ones(len(numbers), dtype=torch.bool), **more)


@pytest.fixture
def rows():
    return torch.randn(200, 32, generator=torch.Generator().manual_seed(0))


def shaken(rows, share, seed):
    signs = torch.randint(0, 2, rows.shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return rows * (1 + share * signs)


@pytest.mark.parametrize(("share", "differs"), [(1e-5, False), (3e-5, False), (6e-5, True)])
def test_a_tensor_differs_where_it_is_four_times_as_far_as_noise_takes_it(rows, share, differs):
    gaps = compared(tensor(rows), tensor(shaken(rows, share, 1)), tensor(shaken(rows, 1e-5, 2)))
    assert bool((gaps.excess > 1).any()) is differs and gaps.whole == pytest.approx(share / 1e-5, rel=0.1)


def test_one_token_differs_alone(rows):
    other = shaken(rows, 1e-5, 1)
    other[17] = shaken(rows[17], 1e-2, 3)
    gaps = compared(tensor(rows), tensor(other), tensor(shaken(rows, 1e-5, 2)))
    assert set(gaps.numbers[gaps.excess > 1].tolist()) == {17}


def test_a_number_that_is_not_finite_differs(rows):
    other = rows.clone()
    other[3, 5] = torch.nan
    gaps = compared(tensor(rows), tensor(other), tensor(shaken(rows, 1e-5, 2)))
    assert set(gaps.numbers[gaps.excess > 1].tolist()) == {3}


def test_log_probs_round_where_their_logits_do():
    """Of a model that is sure of nearly every token: one unit in the last place of a logit of 16 is 2e-6."""
    sure = torch.full((100, 1), -1e-3)
    sure[0] = -12.0
    other = sure - 2e-6
    assert not bool((compared(tensor(sure), tensor(other), tensor(sure), difference=True).excess > 1).any())
    assert bool((compared(tensor(sure), tensor(other - 1e-3), tensor(sure), difference=True).excess > 1).any())


def test_every_copy_of_a_token_is_compared(rows):
    """Ranks that each have all columns stand for themselves: the second one's is wrong."""
    numbers = sorted([*range(200), 7])
    doubled = rows[numbers].clone()
    doubled[8] += 1
    gaps = compared(tensor(rows), tensor(doubled, numbers))
    assert set(gaps.numbers[gaps.excess > 1].tolist()) == {7}
