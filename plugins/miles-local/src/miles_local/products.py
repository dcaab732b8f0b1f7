"""Products of float32 matrices on a CPU whose rows have the same bits whatever lies beside them.

Matrix libraries choose the order of a sum by the shapes of a product. Here a row's result depends on the row alone:
not on how many rows there are, on zeros behind the keys that it attends to, or on whether the local engine computes it
or a trainer does that is to agree with it to the bit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

ROWS = 16
"""Row counts are multiples of this: products of fewer rows take other kernels (seen up to 15 rows)."""
TILE = 32
"""Rows per product where the row count still changes bits."""
PLAIN_DEPTH = 768
"""Deepest float32 product (input features) whose bits were found independent of the count of rows, a multiple of
ROWS. Deeper ones, and all of lower precision, are split into tiles."""
KEY_CHUNK = 128
"""Keys that one product sums over. Of more than 192 the library makes two sums, and where it parts them depends on the
width."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [R, in] (R a multiple of ROWS) times weight [out, in], plus bias [out]; each row's bits independent of R."""
    out = _product(x, weight)
    return out if bias is None else out.add_(bias)


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if weight.dtype == torch.float32 and weight.shape[1] <= PLAIN_DEPTH:
        return F.linear(x, weight)
    rows = x.shape[0]
    if rows % TILE:
        x = F.pad(x, (0, 0, 0, TILE - rows % TILE))
    if x.shape[0] == TILE:
        return F.linear(x, weight)[:rows]
    return torch.cat([F.linear(tile, weight) for tile in x.split(TILE)])[:rows]


def weighted(shares: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """shares [N, M, T] times values [N, T, d], summed KEY_CHUNK keys at a time; bits independent of M and of zeros
    behind a row's last key."""
    out = torch.bmm(shares[:, :, :KEY_CHUNK], values[:, :KEY_CHUNK])
    for start in range(KEY_CHUNK, shares.shape[2], KEY_CHUNK):
        keys = slice(start, start + KEY_CHUNK)
        out += torch.bmm(shares[:, :, keys], values[:, keys])
    return out
