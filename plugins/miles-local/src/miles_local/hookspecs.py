"""The hooks of the local engine, beside those of the core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles_core.hookspecs import hookspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch


@hookspec("gather", role="rollout", per="prefill")
def prefill_inputs(model: Any, tokens: Sequence[int], images: Sequence[bytes]) -> dict[str, torch.Tensor]:
    """2: what a model that reads images takes beside the tokens [L] of a sequence, by keyword. Those whose names end in
    _ids are per token, [..., L]; others, [n, ...], are joined in a batch. With an implementation the engine builds
    such a model whole, else the part that decodes text."""


@hookspec("chain", role="rollout", per="sync")
def import_weights(stream: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """9: what came from `export_weights`, or from a checkpoint, on its way into an engine that computes with plain
    weights (the local one), as a generator. A tensor may have an attribute `round_inputs`, a function [..., in] -> the
    same: what the layer is to make of all that it multiplies this weight with."""
