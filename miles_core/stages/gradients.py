"""Stage 8, step: what the hook `clip_gradients` is given, after gradients were added up and before the update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Piece:
    """What this rank holds of one parameter's gradient.

    Args:
        name: Megatron's name of the parameter, with layers and experts counted over the whole model; all pieces of one
            parameter share it, on whatever ranks they are, and so do all copies.
        grad: to be changed in place: [shape] of the parameter's part on this rank, under the distributed optimizer a
            flat stretch of it.
        weight: the optimizer's own copy of the parameter, of the same shape; not to be changed.
        counts: it enters sums over ranks. The other pieces are copies of one that does, and have to be scaled alike.
    """

    name: str
    grad: torch.Tensor
    weight: torch.Tensor
    counts: bool


class Gradients(Protocol):
    """The gradients of one model on one rank; all ranks of the model have to do the same with theirs.

    Parameters to which a plugin gave a `clip_group` (hook `build_model`) are no part of it: each group comes by itself.

    Args:
        model: "actor", or the name of another model that trains.
        clip_grad: the model's --clip-grad.
        pieces: what this rank's optimizer updates.
    """

    model: str
    clip_grad: float
    pieces: Sequence[Piece]

    def sums(self, values: Mapping[str, torch.Tensor | float]) -> dict[str, float]:
        """Numbers by name, added up over all ranks; ranks may have different names. Every rank calls it.

        The square of the global norm is sums({"norm": sum of squares of all pieces that count})["norm"].
        """

    def clip_by_norm(self) -> float:
        """The trainer's own clipping: scale all so that the global norm is at most `clip_grad`, unless that is 0.

        Returns:
            The norm before.
        """
