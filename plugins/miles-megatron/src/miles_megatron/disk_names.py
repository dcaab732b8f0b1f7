"""Where the tensors that a weight map names lie in a checkpoint's files, which may call and pack them otherwise.

A part of a larger model has a prefix of its own there, and some checkpoints keep all experts of a layer in one tensor.
Everything else here sees the names of the rules alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from miles_megatron.mxfp4 import BLOCKS, SCALES, dequantised
from miles_megatron.readers import Readers
from miles_megatron.shards import tensor_files
from miles_megatron.specs import Packed, WeightMap


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor of the files, or what an expert has of one."""

    name: str
    packed: Packed | None = None
    expert: int = 0
    part: int = 0
    scales: str = ""  # of rounded numbers, the tensor with their exponents

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """A view of what is there of an expert's share of the packed tensor."""
        packed = self.packed
        if packed is None:
            return whole
        rows = whole.mT if packed.transposed and whole.dim() > 1 and not self.scales else whole
        count = len(packed.parts)
        return rows[self.part::count] if packed.alternating else rows.chunk(count)[self.part]

    def shape(self, whole: Sequence[int]) -> list[int]:
        """Of what is there, where the tensor of the files has the shape `whole`."""
        if self.packed is None:
            return list(whole)
        one = [*whole[1:-2], 2 * whole[-2] * whole[-1]] if self.scales else whole[1:]
        return list(self.of(torch.empty(one, device="meta")).shape)

    def dtype(self, whole: torch.dtype) -> torch.dtype:
        """Of what is there, where the tensor of the files has another."""
        return torch.bfloat16 if self.scales else whole


def places(names: Iterable[str], weight_map: WeightMap) -> dict[str, Place]:
    """Names of a checkpoint's tensors -> by the names of the rules, where each lies."""
    located = {}
    for name in names:
        plain = _begun(name, [(theirs, ours) for ours, theirs in weight_map.renamed])
        for packed in weight_map.packed:
            ends = {packed.stored: "", packed.stored + BLOCKS: name.removesuffix(BLOCKS) + SCALES}
            end = next((end for end in ends if plain.endswith(end) and (packed.mxfp4 or not ends[end])), None)
            if end is not None and plain.startswith(packed.within):
                stem = plain.removesuffix(end)
                located |= {stem + part.format(expert=expert): Place(name, packed, expert, i, ends[end])
                          for expert in range(packed.experts) for i, part in enumerate(packed.parts)}
                break
        else:
            located[plain] = Place(name)
    scales = {place.scales for place in located.values()}
    return {plain: place for plain, place in located.items() if place.name not in scales}


def on_disk(name: str, weight_map: WeightMap) -> str:
    """What the files call a tensor that is not packed."""
    return _begun(name, weight_map.renamed)


def _begun(name: str, beginnings: Sequence[tuple[str, str]]) -> str:
    """The name with another beginning, of the first that it has."""
    return next((after + name.removeprefix(before) for before, after in beginnings if name.startswith(before)), name)


class PlainReaders:
    """Reads tensors of a checkpoint by the names of the rules; to be closed as Readers are.

    Args:
        files: name in the files -> file.
    """

    def __init__(self, files: Mapping[str, Path], weight_map: WeightMap):
        self.places = places(files, weight_map)
        self._read = Readers(dict(files))

    def __enter__(self) -> PlainReaders:
        self._read.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._read.__exit__(*exc)

    def shape(self, name: str) -> list[int]:
        """Of a tensor, without reading it."""
        place = self.places[name]
        return place.shape(self._read.shape(place.name))

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor; of a packed one no more than the expert's share is read."""
        place = self.places[name]
        if place.packed is None:
            return self._read.tensor(place.name)
        whole = self._read.row(place.name, place.expert)
        return place.of(dequantised(whole, self._read.row(place.scales, place.expert)) if place.scales else whole)


class _Packing:
    """Names of the rules -> the packed tensors that they go into."""

    def __init__(self, weight_map: WeightMap):
        self.weight_map = weight_map
        self._patterns = [(packed, i, re.compile(re.escape(part).replace(r"\{expert\}", r"(\d+)") + "$"))
                          for packed in weight_map.packed for i, part in enumerate(packed.parts)]

    def place(self, name: str) -> Place:
        for packed, i, pattern in self._patterns:
            if name.startswith(packed.within) and (match := pattern.search(name)):
                stored = on_disk(name[:match.start()] + packed.stored, self.weight_map)
                return Place(stored, packed, int(match[1]) if pattern.groups else 0, i)
        return Place(on_disk(name, self.weight_map))


Layout = dict[str, tuple[torch.dtype, list[int]]]
"""Tensor -> dtype and shape."""


def disk_layout(layout: Layout, weight_map: WeightMap) -> Layout:
    """That of tensors by the names of the rules -> by those of the files, in the order of `to_disk`."""
    stored: Layout = {}
    packing = _Packing(weight_map)
    for name, (dtype, shape) in layout.items():
        place = packing.place(name)
        stored.setdefault(place.name, (dtype, _whole(place.packed, shape) if place.packed else shape))
    return stored


def to_disk(stream: Iterable[tuple[str, torch.Tensor]], weight_map: WeightMap) -> Iterator[tuple[str, torch.Tensor]]:
    """A stream of a model's tensors by the names of the rules -> by those of the files.

    What goes into one packed tensor follows each other, as the rules have it; it is sent on once it is complete.
    """
    packing = _Packing(weight_map)
    pending: dict[str, tuple[torch.Tensor, int]] = {}
    for name, tensor in stream:
        place = packing.place(name)
        if place.packed is None:
            yield place.name, tensor
            del tensor  # so that a stream that reads has one in memory at a time
            continue
        whole, count = pending.pop(place.name, (None, 0))
        if whole is None:
            whole = tensor.new_empty(_whole(place.packed, tensor.shape))
        place.of(whole[place.expert]).copy_(tensor)
        if count + 1 == place.packed.experts * len(place.packed.parts):
            yield place.name, whole
        else:
            pending[place.name] = whole, count + 1


def to_plain(stream: Iterable[tuple[str, torch.Tensor]], weight_map: WeightMap) -> Iterator[tuple[str, torch.Tensor]]:
    """The inverse of `to_disk`; what was packed are views."""
    for name, tensor in stream:
        for plain, place in places([name], weight_map).items():
            yield plain, place.of(tensor[place.expert]) if place.packed else tensor


def changed(stream: Iterable[tuple[str, torch.Tensor]], weight_map: WeightMap,
            change: Callable[[str, torch.Tensor], torch.Tensor], *,
            packed_alone: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """A stream by the names of the files, whose tensors become `change(name in the rules, tensor)` of the same shape.

    Args:
        packed_alone: only what is packed is changed, part by part.
    """
    for name, tensor in stream:
        located = places([name], weight_map)
        if not any(place.packed for place in located.values()):
            yield name, tensor if packed_alone else change(next(iter(located), name), tensor)
            continue
        whole = tensor.clone()
        for plain, place in located.items():
            part = place.of(whole[place.expert])
            part.copy_(change(plain, part))
        yield name, whole


def split(stream: Iterable[tuple[str, torch.Tensor]], weight_map: WeightMap,
          taken: Callable[[str], bool]) -> Iterator[tuple[str, torch.Tensor]]:
    """A stream by the names of the files, in which what is packed falls apart where a part's name is taken.

    Args:
        taken: asked with the names that the files would have for the parts.
    """
    for name, tensor in stream:
        parts = {on_disk(plain, weight_map): place for plain, place in places([name], weight_map).items()
                 if place.packed is not None}
        if any(map(taken, parts)):
            yield from ((part, place.of(tensor[place.expert]).contiguous()) for part, place in parts.items())
        else:
            yield name, tensor


def _whole(packed: Packed, shape: Sequence[int]) -> list[int]:
    one = [shape[0] * len(packed.parts), *shape[1:]]
    return [packed.experts, *(reversed(one) if packed.transposed else one)]


def carried_files(folder: Path, weight_map: WeightMap) -> dict[str, Path]:
    """Tensors of a checkpoint that are no part of the model and that an export has as they are -> their files."""
    known = tensor_files(folder) if weight_map.carried and any(folder.glob("*.safetensors")) else {}
    return {name: known[name] for name in sorted(known) if name.startswith(weight_map.carried)}


def carried(folder: Path, weight_map: WeightMap) -> Iterator[tuple[str, torch.Tensor]]:
    """Those tensors, one after the other."""
    files = carried_files(folder, weight_map)
    with Readers(files) as read:
        yield from ((name, read.tensor(name)) for name in files)


def packed_with(name: str, weight_map: WeightMap) -> str:
    """The tensor of the files that a tensor of the rules goes into."""
    return _Packing(weight_map).place(name).name
