"""Stage 8, step: the contract of a trainer. A rank is a plain class; a host (miles_core.hosts) runs it.

Calls arrive in the loop's order: `load` once, then for each rollout `take_batch`, `score`, `advantage`, one `step` per
optimizer step, `end_batch`; `weights` whenever the engine is synced, `save` when a checkpoint is due.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from miles_core.types import Batch, Sample

if TYPE_CHECKING:
    import torch

    from miles_core.stages.loss import PolicyLoss
    from miles_core.stages.sync import Sender


@dataclass(frozen=True, slots=True)
class Resume:
    """Where a run goes on.

    Args:
        rollout_id: the first rollout to do.
        state: what the other parts saved beside the weights (JSON), None on a fresh start.
        source: what was loaded, for the log: "Loaded checkpoint from ...".
    """

    rollout_id: int
    state: dict[str, Any] | None
    source: str


class ScoredRows(Protocol):
    """What one forward of a model says about the N trained rows of a micro-batch; without gradient in scoring passes.

    `rows` holds every per-token column on the same rows, [N, *axes].
    """

    rows: Mapping[str, torch.Tensor]

    def log_probs(self, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """log p [N] of the row's own target, or [N, K] of `tokens` [N, K]; temperature-scaled, untruncated."""

    def top_k(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The k likeliest tokens of each row, [N, k] int64, and their log-probs [N, k]."""

    def values(self) -> torch.Tensor:
        """[N] of a model with a value head."""


class TrainerAccess(Protocol):
    """What a plugin may do on a trainer rank inside `log_prob` and `train_step`; every rank has to do the same.

    Args:
        batch: the whole rollout, the same on every rank.
        index: the optimizer step within the rollout; None while scoring.
        samples: what this step trains on, or the whole batch while scoring.
    """

    batch: Batch
    index: int | None
    samples: Sequence[Sample]

    def forward(self, model: str, read: Callable[[ScoredRows], Mapping[str, torch.Tensor]]) -> None:
        """A pass without gradient over `samples`: what `read` returns, [N, ...] by column, is put into the columns of
        all samples on all ranks; rows that are not trained on hold 0."""

    def step(self, model: str, loss: PolicyLoss) -> dict[str, float]:
        """One optimizer step of a trainable model; metrics are named MODEL/... for others than the actor."""

    def chunks(self, model: str) -> Sequence[torch.nn.Module]:
        """This rank's part of the model: one module, or one for each virtual pipeline stage."""

    def optimizer(self, model: str) -> object:
        """Megatron's optimizer of a trainable model."""

    def scheduler(self, model: str) -> object:
        """Megatron's schedule of its learning rate and weight decay."""


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

    def end_batch(self) -> Batch | None:
        """Give the batch back with the trainer's columns in it; None on ranks but the first."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]] | None:
        """The complete policy as Hugging Face names and tensors, streamed; None on ranks but the first."""

    def connect(self, sender: Sender | None) -> None:
        """Open a sender on every rank in place of the one before, which is closed."""

    def send(self, version: int) -> dict[str, float] | None:
        """`weights` through the sender; the first rank's figures."""

    def offload(self, tags: Sequence[str]) -> None:
        """Move what the tags name ("weights", "gradients", "optimizer") off the device; what is off stays off."""

    def onload(self, tags: Sequence[str]) -> None:
        """The inverse of `offload`; gradients come back as zeros."""

    def save(self, folder: Path, rollout_id: int, state: dict[str, Any]) -> None:
        """Write a checkpoint that `load` resumes after this rollout; published only when complete.
        With --async-save that may be after it returns: the next `save` waits, and later calls raise what went wrong."""

    def saved(self) -> None:
        """Wait until what `save` began is published; called after the last one of a run with --async-save."""

    def export(self, folder: Path) -> None:
        """Write a Hugging Face directory."""

    def hashes(self, batch: Batch) -> Mapping[str, Any] | None:
        """For --debug-determinism: of `weights` and `batch`, name -> hash each; None on ranks but the first."""

    def close(self) -> None:
        """Leave process groups and connections: the host calls it last, unless it was killed."""
