"""The hooks of the local engine, beside those of the core."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_core.hookspecs import hookspec

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


@hookspec("chain", role="rollout", per="sync")
def import_weights(stream: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """9: what came from `export_weights`, or from a checkpoint, on its way into an engine that computes with plain
    weights (the local one), as a generator."""
