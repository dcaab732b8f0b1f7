"""Adapters of Megatron's layers from a PEFT folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from miles_megatron.specs import WeightMap
from miles_megatron.weights import global_parameters, load_hf

from miles_lora import peft
from miles_lora.targets import INSIDE, PEFT, alone


def fill(chunk: torch.nn.Module, weight_map: WeightMap, folder: Path, shape: peft.Shape) -> None:
    """The adapters of a model from a PEFT folder.

    Raises:
        CheckpointError: adapters of other layers, or of another rank or alpha.
    """
    peft.check(folder, shape)
    frozen = {name for name, one in global_parameters(chunk).items() if not one.requires_grad}
    inside = tuple((f"{PEFT}model.", PEFT + outer) for outer in INSIDE)
    load_hf(folder, chunk, replace(alone(weight_map), renamed=inside), but=frozenset(frozen))
