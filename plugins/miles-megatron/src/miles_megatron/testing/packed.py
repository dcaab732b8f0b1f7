"""Packed sequences of a model that know nothing of each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from miles_megatron.packed_layout import packed_rows
from miles_megatron.testing.parity import LENGTHS


@torch.no_grad()
def hidden(built: Any, sequences: Sequence[torch.Tensor], padding: int = 0) -> tuple[torch.Tensor, ...]:
    """[T, H] by sequence; `padding` rows follow that belong to none.

    Args:
        built: a model of one stage without parallelism.
        sequences: token ids.
    """
    bounds = torch.tensor([0, *map(len, sequences)]).cumsum(0)
    tokens = torch.cat([*sequences, torch.full((padding,), 7)])[None]
    states = built(tokens, None, None, packed_seq_params=packed_rows(bounds))
    return tuple(states[: bounds[-1], 0].split([*map(len, sequences)]))


def check_nothing_leaks(built: Any) -> None:
    """With one sample's tokens changed, every other sample has the same bits; so it has beside more padding rows."""
    draw = torch.Generator().manual_seed(0)
    sequences = [torch.randint(3, 96, (length,), generator=draw) for length in LENGTHS]
    before = hidden(built, sequences, padding=5)
    for changed in range(len(sequences)):
        others = list(sequences)
        others[changed] = (others[changed] + 1) % 90 + 3
        after = hidden(built, others, padding=5)
        same = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
        assert same == [i != changed for i in range(len(sequences))]
    for alone, beside in zip(sequences, before, strict=True):
        torch.testing.assert_close(hidden(built, [alone])[0], beside, rtol=1e-5, atol=1e-5)
