"""The estimate over token sets: by hand, with Python sets in float64, and against the divergence itself."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_opd.reverse_kl import chosen, reverse_kl

STRATEGIES = ("intersection", "union", "xor")
MODES = ("student_p", "teacher_p", "none")


def logs(*rows):
    return torch.tensor(rows, dtype=torch.float64).log()


@pytest.mark.parametrize("mode, expected", [
    ("student_p", 0.75 * math.log(3) + 0.25 * math.log(0.5)),  # weights 0.6 : 0.2
    ("teacher_p", 1 / 3 * math.log(3) + 2 / 3 * math.log(0.5)),  # weights 0.2 : 0.4
    ("none", 0.5 * math.log(3) + 0.5 * math.log(0.5)),
])
def test_two_of_three_candidates_by_hand(mode, expected):
    student, teacher = logs([0.6, 0.2, 0.1]), logs([0.2, 0.4, 0.3])
    member = torch.tensor([[True, True, False]])
    assert reverse_kl(student, teacher, member, mode).tolist() == [pytest.approx(expected)]


def test_weights_that_are_not_normalised_are_the_probabilities_or_one():
    student, teacher, member = logs([0.6, 0.2]), logs([0.2, 0.4]), torch.tensor([[True, True]])
    for mode, (one, other) in {"student_p": (0.6, 0.2), "teacher_p": (0.2, 0.4), "none": (1, 1)}.items():
        found = reverse_kl(student, teacher, member, mode, normalised=False)
        assert found.tolist() == [pytest.approx(one * math.log(3) + other * math.log(0.5))]


def test_an_empty_set_is_no_divergence():
    member = torch.zeros(1, 2, dtype=torch.bool)
    for mode in MODES:
        assert reverse_kl(logs([0.5, 0.5]), logs([0.9, 0.1]), member, mode).tolist() == [0]


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 12))
def test_over_the_whole_vocabulary_it_is_the_reverse_kl(seed, size):
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (torch.randn(3, size, generator=generator, dtype=torch.float64).log_softmax(1)
                        for _ in range(2))
    everything = torch.ones(3, size, dtype=torch.bool)
    expected = torch.nn.functional.kl_div(teacher, student, reduction="none", log_target=True).sum(1)
    torch.testing.assert_close(reverse_kl(student, teacher, everything, "student_p"), expected)


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.sampled_from(STRATEGIES), st.sampled_from(MODES))
def test_sets_are_pythons(seed, k, strategy, mode):
    """Each token counts once, whichever list it is on, with the same number."""
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(2, 8, generator=generator, dtype=torch.float64).log_softmax(1) for _ in range(2))
    (top, mine), (best, theirs) = p.topk(k, 1), q.topk(k, 1)
    member = torch.cat(chosen(mine, theirs, strategy), 1)
    student, teacher = torch.cat([top, p.gather(1, theirs)], 1), torch.cat([q.gather(1, mine), best], 1)
    found = reverse_kl(student, teacher, member, mode, strategy != "xor")
    for n in range(2):
        one, other = set(mine[n].tolist()), set(theirs[n].tolist())
        tokens = sorted({"intersection": one & other, "union": one | other, "xor": one ^ other}[strategy])
        weights = [{"student_p": p, "teacher_p": q, "none": torch.zeros_like(p)}[mode][n, t].exp() for t in tokens]
        total = sum(weights) if strategy != "xor" else 1
        expected = sum(w / total * (p[n, t] - q[n, t]) for w, t in zip(weights, tokens, strict=True))
        assert float(found[n]) == pytest.approx(float(expected), rel=1e-9, abs=1e-12)
