"""What a plan says of adapters. No torch here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from miles_core.reading import parse_json
from miles_lora.targets import PLAIN, chosen, last, without_plain_attention

TOWER = re.compile(r"(^|\.)(vision|visual|audio)")
"""In the names of what reads images and sound beside a language model."""
EXPERT, DOWN = re.compile(r"\.experts\.\d+\."), ("down_proj", "w2")
"""Of an expert, and which of its layers gives hidden states."""


def parameters(folder: Path, wanted: Sequence[str], excluded: Sequence[str], rank: int, shared: bool = False) -> int:
    """How many numbers the adapters of a checkpoint have, by the headers of its files; 0 where there are none.

    Args:
        wanted, excluded: see `targets.chosen`.
        shared: experts of a layer share A or, of the layer that gives hidden states, B.
    """
    count, of_all = 0, {}
    for name, (outputs, inputs) in _shapes(folder):
        if not chosen(name, wanted, excluded):
            continue
        count += rank * (outputs + inputs)
        if shared and (expert := EXPERT.search(name)):
            outer = rank * (outputs if last(name) in DOWN else inputs)
            of_all[name.replace(expert[0], ".experts.")] = outer
            count -= outer
    return count + sum(of_all.values())


def without_layers(folder: Path, wanted: Sequence[str]) -> list[str]:
    """See `targets.without_plain_attention`; nothing where there are no files."""
    return without_plain_attention((name for name, _ in _shapes(folder)), wanted) if {*wanted} & {*PLAIN} else []


def rank_of(adapter: Path) -> int | None:
    """That of a PEFT directory, where it says one."""
    path = adapter / "adapter_config.json"
    rank = parse_json(path.read_text(encoding="utf-8")).get("r") if path.is_file() else None
    return rank if isinstance(rank, int) else None


def _shapes(folder: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """Of the matrices of all layers."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, entry in header.items():
            if ".layers." in name and name.endswith(".weight") and len(entry["shape"]) == 2 and not TOWER.search(name):
                yield name, tuple(entry["shape"])
