"""Stage 8, step: the contract of a trainer. A rank is a plain class; a host (miles_core.hosts) runs it.

Calls arrive in the loop's order: `load` once, then for each rollout `take_batch`, `score`, `advantage`, one `step` per
optimizer step, `end_batch`; `weights` whenever the engine is synced, `save` when a checkpoint is due.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from miles_core.types import Batch

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Resume:
    """Where a run goes on.

    Args:
        rollout_id: the first rollout to do.
        state: what the other parts saved beside the weights (JSON), None on a fresh start.
        source: what was loaded, for the log: "Loaded checkpoint from ...".
    """

    rollout_id: int
    state: dict | None
    source: str


class Trainer(Protocol):
    """What every trainer can do. Metrics are plain floats by name."""

    def load(self) -> Resume:
        """Build the models and load --load, else --ref-load, else --hf-checkpoint."""

    def take_batch(self, batch: Batch) -> None:
        """Keep the batch on the trainer's side; the calls below work on it."""

    def score(self) -> dict[str, float]:
        """Fill the columns log_probs and, with a reference model, ref_log_probs; report their metrics."""

    def advantage(self) -> dict[str, float]:
        """Fill the column advantages: the named hook sees the whole batch, its groups unsplit."""

    def step(self, index: int) -> dict[str, float]:
        """One optimizer step on the batch's index-th part.

        Raises:
            NonFiniteError: before the optimizer saw it; names the sample or the parameter.
        """

    def end_batch(self) -> Batch:
        """Give the batch back with the trainer's columns in it."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The complete policy as Hugging Face names and tensors, streamed."""

    def save(self, folder: Path, rollout_id: int, state: dict) -> None:
        """Write a checkpoint that `load` resumes after this rollout; published only when complete."""

    def export(self, folder: Path) -> None:
        """Write a Hugging Face directory."""
