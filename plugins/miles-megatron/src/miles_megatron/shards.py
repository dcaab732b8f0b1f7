"""The weight files of a Hugging Face directory: their names, their index, and the safetensors format itself.

https://github.com/huggingface/safetensors#format, read and written a tensor at a time.

Plain reads and writes. The pages of a file that is mapped count as the process's memory until it is closed, and a full
disk kills who writes through a map with SIGBUS, where a write raises OSError.
"""

from __future__ import annotations

import contextlib
import json
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from miles_local.weights import unindexed

from miles_core.errors import CheckpointError
from miles_core.reading import parse_json

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
_MOST = 10**8
"""Bytes that a header may have, as in the format's own reader."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file; `offset` counts bytes from the file's beginning."""

    file: Path
    dtype: torch.dtype
    shape: list[int]
    offset: int


def stored_tensors(file: Path) -> dict[str, Stored]:
    """What a file holds, by its header.

    Raises:
        CheckpointError: no such file, not a safetensors file, cut short, or a dtype that torch does not have.
    """
    try:
        with open(file, "rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = parse_json(opened.read(size) if size <= _MOST else "")
        header.pop("__metadata__", None)
        first, end = 8 + size, file.stat().st_size
        entries = {name: (str(one["dtype"]), [operator.index(edge) for edge in one["shape"]],
                        *map(operator.index, one["data_offsets"])) for name, one in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable(file, str(error)) from error
    for name, (dtype, shape, start, stop) in entries.items():
        if dtype not in _BY_NAME:
            raise CheckpointError(f"the tensor {name} is stored as {dtype}", code="tensor-dtype-unsupported",
                                  who=str(file), fix=f"use a checkpoint of these: {', '.join(_BY_NAME)}")
        if stop - start != math.prod(shape) * _BY_NAME[dtype].itemsize or not 0 <= start <= stop <= end - first:
            raise _unreadable(file, f"{name} lies outside of the file or has another size, by the header")
    return {name: Stored(file, _BY_NAME[dtype], shape, first + start)
            for name, (dtype, shape, start, _) in entries.items()}


def outlines(folder: Path) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a folder on the device meta, in the order of its files.

    Raises:
        CheckpointError: as `tensor_files` and `stored_tensors`.
    """
    return [(name, torch.empty(one.shape, device="meta")) for file in sorted(set(tensor_files(folder).values()))
            for name, one in stored_tensors(file).items()]


def read_into(stored: Stored, target: torch.Tensor) -> None:
    """Fill `target`, any shape of as many elements in the same order; a dtype of its own casts.

    Raises:
        CheckpointError: the file cannot be read any more.
    """
    direct = target.is_contiguous() and target.dtype == stored.dtype
    tensor = target if direct else torch.empty(target.shape, dtype=stored.dtype)
    left = _bytes(tensor)
    try:
        with open(stored.file, "rb", buffering=0) as file:
            file.seek(stored.offset)
            while left:
                count = file.readinto(left)
                if not count:
                    raise _unreadable(stored.file, "it has become shorter")
                left = left[count:]
    except OSError as error:
        raise _unreadable(stored.file, str(error)) from error
    if not direct:
        target.copy_(tensor)


@contextlib.contextmanager
def writing(path: Path, layout: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> Iterator[Callable]:
    """Write a file: the block appends the tensors, in the order of the layout.

    Args:
        layout: name -> dtype and shape.

    Raises:
        OSError: the disk is full, or the file cannot be written.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in layout.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        yield lambda tensor: file.write(_bytes(tensor.contiguous()))


def shard_name(number: int, count: int) -> str:
    """transformers' name of the file `number` of `count`, from 0."""
    return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def write_index(target: Path, shards: Sequence[Iterable[str]], total: int) -> None:
    """Which file holds which tensor; a sole file needs no index.

    Args:
        shards: the names in each file.
        total: bytes of all tensors.
    """
    if len(shards) > 1:
        where = {name: shard_name(i, len(shards)) for i, names in enumerate(shards) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, from the index or from the headers; see `unindexed`."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            where = {name: folder / file for name, file in parse_json(index.read_text())["weight_map"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError("the index of the tensor files cannot be read", got=str(error), who=str(index),
                                  fix="fetch the checkpoint again", code="tensor-index-unreadable") from error
        if absent := sorted({file.name for file in where.values() if not file.is_file()}):
            raise CheckpointError("files that the index names are missing", got=few(absent), who=str(folder),
                                  fix="fetch the checkpoint again", code="tensor-files-missing")
        return where
    if not (files := unindexed(folder)):
        raise CheckpointError("no .safetensors files found", code="safetensors-missing", who=str(folder),
                              got="a folder" if folder.is_dir() else "no such folder",
                              fix="give a Hugging Face directory with weights in safetensors")
    return {name: file for file in files for name in stored_tensors(file)}


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())


def _unreadable(file: Path, got: str) -> CheckpointError:
    return CheckpointError("a tensor file cannot be read", code="tensor-file-unreadable", got=got, who=str(file),
                           fix="fetch the checkpoint again")


def few(names: Sequence[str], most: int = 8) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
