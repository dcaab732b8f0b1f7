"""The number of a token: its sample's place in the batch, and its own in the sample."""

from __future__ import annotations

from typing import Any

from miles_core.columns import Align, Column

ROW = Column("divergence_row", Align.TOKEN, "int64", pad=-1, missing="pad", owner="divergence")
"""Numbers of the tokens: they take the same way into a micro-batch as the tokens themselves; -1 is padding."""

def number(sample: int, token: Any) -> Any:
    """Of one token, or of an array of them; ascending by sample, then by token."""
    return (sample << 32) + token


def sample_of(number: Any) -> Any:
    """The sample's place in the batch; of a number, or of a tensor of them."""
    return number >> 32


def token_of(number: Any) -> Any:
    """The token's place in its sample."""
    return number & 0xFFFFFFFF
