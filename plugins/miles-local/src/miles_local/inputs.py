"""What sequences are fed beside their tokens, such as pixels and positions of images, laid out for a batch of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

SequenceInputs = Callable[[Any, Sequence[int], Sequence[bytes]], dict[str, torch.Tensor]]
"""The bound hook prefill_inputs."""
AHEAD = ("ahead", 0, 0)
"""Key of a row's state: how far the positions of its further tokens are ahead of their places. An image's tokens have
fewer positions than places in some architectures."""


def laid_out(inputs: SequenceInputs, model: Any, sequences: Sequence[Sequence[int]],
             images: Sequence[Sequence[bytes]], width: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """
    Args:
        images: of each of the U sequences.
        width: places of a row; those behind a sequence hold 0.

    Returns:
        Keyword arguments of the module: per-token ones [..., U, width], others [sum of n, ...]; and AHEAD, [U] int64.
    """
    parts = [inputs(model, ids, pictures) for ids, pictures in zip(sequences, images, strict=True)]
    arguments = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        values = [part[name] for part in parts if name in part]
        arguments[name] = torch.stack([F.pad(one, (0, width - one.shape[-1])) for one in values], -2) if (
            name.endswith("_ids")) else joined(values)
    ahead = [int(part["position_ids"].max()) + 1 - len(ids) if "position_ids" in part else 0
             for ids, part in zip(sequences, parts, strict=True)]
    return arguments, torch.tensor(ahead)


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """[n, ...] each -> [sum of n, ...], smaller ones filled up with zeros behind, as processors do with images."""
    largest = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    return torch.cat([F.pad(part, [edge for size, most in zip(part.shape[:0:-1], largest[::-1], strict=True)
                                   for edge in (0, most - size)]) for part in parts])
