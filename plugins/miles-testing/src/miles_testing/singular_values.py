"""What Muon's steps come to, computed the plain way."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def on_singular_values(matrices: torch.Tensor, steps: int, polynomials: Sequence[tuple[float, float, float]]
                       ) -> torch.Tensor:
    """Polynomials a s + b s^3 + c s^5, taken in turns, of the singular values s of [..., rows, columns], in float64."""
    left, values, right = torch.linalg.svd(matrices.double(), full_matrices=False)
    values = values / values.square().sum(-1, keepdim=True).sqrt()
    for step in range(steps):
        a, b, c = polynomials[step % len(polynomials)]
        values = a * values + b * values**3 + c * values**5
    exact: torch.Tensor = left @ torch.diag_embed(values) @ right
    return exact
