"""How far two sides may be apart by rounding alone: as far as rounding takes one of them from itself.

Side A is replayed once more with noise: every output of a module without parts is multiplied by 1 + u or 1 - u, u the
last place of the coarsest dtype in either side. What this makes of a tensor is the spread that rounding has there, its
growth from layer to layer included, of this model on this batch: the tolerance of a token is its own spread, or the
root mean square over all tokens, whichever is larger, and at least u times the tensor itself, for what no noise has
reached yet.

Rounding of two sides is as large as that of one with noise, but for the luck of the draw. So a tensor differs as a
whole where root mean squares are more than ALL apart, and a single token where it is EACH tolerances away: one among
many may be unlucky.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from miles_divergence.recording import Tensor

EACH, ALL = 64.0, 4.0
"""Equal sides of all families come to 19 and 2.1 at most, nearly all of them to 6 and 1.2 (test_equal_sides.py)."""


@dataclass(slots=True)
class Distances:
    """How far apart a tensor of two sides is.

    Args:
        numbers: [rows] of tokens; a token that several ranks computed comes up for each.
        excess: [rows] distance over the limit; above 1 it is no rounding.
        relative: [rows] distance over the root mean square length of the tensor's rows.
        whole: root mean square of the distances over that of the tolerances.
    """

    numbers: torch.Tensor
    excess: torch.Tensor
    relative: torch.Tensor
    whole: float


def distances(a: Tensor, b: Tensor, noisy: Tensor | None, epsilon: float,
              counts: Callable[[torch.Tensor], torch.Tensor], *, difference: bool = False) -> Distances:
    """Compare the rows of the tokens that both sides have.

    Args:
        noisy: a with noise; None where rounding has left no trace.
        epsilon: the last place.
        counts: numbers -> which of these tokens are compared.
        difference: the values are differences of larger numbers, log-probs of logits, whose last place counts.
    """
    numbers, gaps = _gaps(a, b)
    lengths = a.values.double().norm(dim=1)
    size = float(lengths.square().mean().sqrt()) or 1.0
    # How far logits reach, the smallest log-prob says.
    tolerance = torch.full_like(gaps, epsilon * (float(lengths.max()) if difference else size))
    if noisy is not None:
        known, spread = _gaps(a, noisy)
        tolerance = tolerance.clamp(min=float(spread.square().mean().sqrt()))
        order = torch.argsort(known, stable=True)
        place = torch.searchsorted(known[order], numbers).clamp(max=len(known) - 1)
        tolerance = torch.maximum(tolerance, spread[order][place])
    keep = counts(numbers)
    numbers, gaps, tolerance = numbers[keep], gaps[keep].nan_to_num(torch.inf), tolerance[keep]
    whole = float((gaps.square().mean() / tolerance.square().mean()).sqrt()) if len(gaps) else 0.0
    return Distances(numbers, gaps / (tolerance * (ALL if whole > ALL else EACH)), gaps / size, whole)


def _gaps(a: Tensor, b: Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """([rows] numbers, [rows] Euclidean distances) of every row of one side from the other's first of that token."""
    numbers, gaps = [], []
    for one, other in ((a, b), (b, a)):
        place = torch.searchsorted(other.numbers, one.numbers).clamp(max=len(other.numbers) - 1)
        both = other.numbers[place] == one.numbers
        numbers.append(one.numbers[both])
        gaps.append((one.values[both].double() - other.values[place[both]].double()).norm(dim=1))
    return torch.cat(numbers), torch.cat(gaps)
