"""Adapters between a run and its folders: what a checkpoint is filled from, and what it is saved as."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from miles_megatron.specs import WeightMap
from miles_megatron.weights import global_parameters, load_hf

from miles_lora import peft
from miles_lora.merging import Stream, merged
from miles_lora.targets import adapter_of, alone


def saved(stream: Stream, shape: peft.Shape, folder: Path, base: str) -> Stream:
    """The merged model; its end leaves FOLDER-adapter beside it, which PEFT reads."""
    adapters: dict[str, torch.Tensor] = {}

    def seen() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in stream:
            if adapter_of(name) is not None and dist.get_rank() == 0:
                adapters[name] = tensor.to("cpu", copy=True)
            yield name, tensor

    yield from merged(seen(), shape.scale)
    if dist.get_rank() == 0:
        peft.write(folder.with_name(f"{folder.name}-adapter"), shape, adapters, base)


def fill(chunk: torch.nn.Module, weight_map: WeightMap, folder: Path, shape: peft.Shape) -> None:
    """The adapters of a model from a PEFT folder.

    Raises:
        CheckpointError: adapters of other layers, or of another rank or alpha.
    """
    peft.check(folder, shape)
    frozen = {name for name, one in global_parameters(chunk).items() if not one.requires_grad}
    load_hf(folder, chunk, alone(weight_map), but=frozenset(frozen))
