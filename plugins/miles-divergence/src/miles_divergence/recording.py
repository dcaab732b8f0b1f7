"""What a side computed, on disk and whole again: a file for each rank, in safetensors, without pickle."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

_LAYER = re.compile(r"\.(\d+)(\.|$)")

WHAT = ("input", "output", "routing", "log_probs", "gradient", "input_gradient")
"""Of a module: what goes in and comes out, and of a router who gets a token by what weight; of the whole model the
log-probs of the batch's tokens. In the backward pass the gradient by an output, and what a module without parts hands
back to its input."""

BACKWARD = ("gradient", "input_gradient")


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a rank's file.

    Args:
        name: of the module, in Hugging Face's words.
        what: one of WHAT.
        piece: which of several that the module's output consists of.
        order: when it was first seen on this rank.
        shared: tensor-parallel ranks have parts of its columns; otherwise each has all of them.
    """

    name: str
    what: str
    piece: int
    order: int
    shared: bool


@dataclass(slots=True)
class Tensor:
    """One tensor of a side, all ranks' together.

    Args:
        numbers: [rows] of tokens, ascending; a token that several ranks computed has a row of each.
        values: [rows, features] float32.
        place: in the order of the model; comparable within one side.
    """

    numbers: torch.Tensor
    values: torch.Tensor
    place: tuple[int, int]


Key = tuple[str, str]
"""(module, what)."""


@dataclass(slots=True)
class Recording:
    """A side.

    Args:
        epsilon: the last place of the coarsest dtype in it, relative to 1.
        metrics: train/loss and train/grad_norm.
        weights: a fingerprint of each tensor of the checkpoint that the side would write; see `fingerprint`.
    """

    tensors: dict[Key, Tensor]
    epsilon: float
    metrics: dict[str, float] = field(default_factory=dict)
    weights: dict[str, list[float]] = field(default_factory=dict)


def write_rank(folder: Path, rank: int, parts: Sequence[tuple[Entry, torch.Tensor, torch.Tensor]],
               facts: Mapping[str, object]) -> None:
    """Write what one rank saw: an entry, the numbers of its rows and the rows, for each tensor."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for place, (_, numbers, values) in enumerate(parts):
        tensors |= {f"{place}.numbers": numbers.contiguous(), f"{place}.values": values.contiguous()}
    entries = json.dumps([asdict(entry) for entry, _, _ in parts])
    save_file(tensors, folder / f"rank-{rank:05d}.safetensors",
              {"entries": entries, **{name: str(value) for name, value in facts.items()}})


def read(folder: Path) -> Recording:
    """All ranks' files of a side."""
    parts: dict[Key, dict[int, list[tuple[int, Entry, torch.Tensor, torch.Tensor]]]] = defaultdict(
        lambda: defaultdict(list))
    recording = Recording({}, 0.0)
    for rank, path in enumerate(sorted(folder.glob("rank-*.safetensors"))):
        with safe_open(path, "pt") as file:
            facts = file.metadata()
            recording.epsilon = max(recording.epsilon, float(facts["epsilon"]))
            recording.metrics |= json.loads(facts["metrics"])
            for place, values in enumerate(json.loads(facts["entries"])):
                entry = Entry(**values)
                parts[entry.name, entry.what][entry.piece].append(
                    (rank, entry, file.get_tensor(f"{place}.numbers"), file.get_tensor(f"{place}.values")))
    for key, pieces in parts.items():
        laid = [_whole(pieces[piece]) for piece in sorted(pieces)]
        entry = pieces[0][0][1]
        recording.tensors[key] = Tensor(laid[0][0], torch.cat([values for _, values in laid], 1),
                                        (_layer(entry), entry.order))
    if (weights := folder / "weights.json").is_file():
        recording.weights = json.loads(weights.read_text())
    return recording


def fingerprint(tensor: torch.Tensor) -> list[float]:
    """[norm, two products with fixed random directions]: equal but for rounding exactly where tensors are."""
    flat = tensor.detach().flatten().to("cpu", torch.float64)
    draws = torch.randn(2, 65537, generator=torch.Generator().manual_seed(0), dtype=torch.float64)  # no size of a row
    count = -(-len(flat) // draws.shape[1])
    return [float(flat.norm()), *(float(draw.repeat(count)[: len(flat)] @ flat) for draw in draws)]


def _whole(parts: Sequence[tuple[int, Entry, torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of all ranks by token; where ranks share the columns they are put side by side, in the order of ranks."""
    columns: dict[object, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
    for rank, entry, numbers, values in parts:
        # Ranks that share columns have the same tokens; all others stand for themselves.
        columns[numbers.numpy().tobytes() if entry.shared else rank].append((numbers, values))
    numbers = torch.cat([group[0][0] for group in columns.values()])
    values = torch.cat([torch.cat([one for _, one in group], 1) for group in columns.values()])
    real = numbers >= 0
    order = torch.argsort(numbers[real], stable=True)
    return numbers[real][order], values[real][order]


def _layer(entry: Entry) -> int:
    """Before the layers, in one, or behind all."""
    if number := _LAYER.search(entry.name):
        return int(number[1])
    return 1 << 30 if "norm" in entry.name or entry.name.endswith("lm_head") else -1
