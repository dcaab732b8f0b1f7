"""The hooks of the trainer fsdp, beside those of the core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles_core.hookspecs import hookspec

if TYPE_CHECKING:
    import torch

    from miles_core.types import Sample


@hookspec("gather", role="trainer", per="micro-batch")
def forward_inputs(model: Any, sample: Sample) -> dict[str, torch.Tensor]:
    """7: what a model that reads images takes beside the tokens [L] of a sample, by keyword. Those whose names end in
    _ids are per token, [..., L], and input_ids replaces the tokens; others, [n, ...], are joined in a micro-batch. With
    an implementation the trainer builds the whole of such a model."""
