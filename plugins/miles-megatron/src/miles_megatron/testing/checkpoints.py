"""Tensors of a checkpoint: those of a folder, and as releases lay them out where transformers saves them otherwise."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All of a folder's files, by name."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def packed_experts(whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All experts of a layer in two tensors: gate_up_proj [E, 2 F, H], gate before up, and down_proj [E, H, F]."""
    packed: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[tuple[str, int], torch.Tensor]] = {}
    for name, tensor in whole.items():
        if match := re.match(r"(.*mlp\.experts\.)(\d+)\.(\w+)\.weight", name):
            experts.setdefault(match[1], {})[match[3], int(match[2])] = tensor
        else:
            packed[name] = tensor
    for stem, parts in experts.items():
        gate, up, down = ([parts[f"{part}_proj", i] for i in range(len(parts) // 3)] for part in ("gate", "up", "down"))
        packed[stem + "gate_up_proj"] = torch.stack([torch.cat(both) for both in zip(gate, up, strict=True)])
        packed[stem + "down_proj"] = torch.stack(down)
    return packed
