"""What the index of a torch.distributed checkpoint says it holds, read without trust.

`.metadata` is a pickle that torch reads with the full unpickler, so it is read here first with one that knows the few
classes it may hold, by name, and makes stand-ins of them that cannot be called otherwise or changed. Entries other than
tensors, which torch would unpickle too, are refused.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from miles_core.errors import CheckpointError

Held = Mapping[str, tuple[int, ...]]
"""Tensor name -> its whole shape."""

_METADATA, _LEGACY = "torch.distributed.checkpoint.metadata", "torch.distributed._shard.sharded_tensor.metadata"
_PLANNER, _MEGATRON = "torch.distributed.checkpoint.planner", "megatron.core.dist_checkpointing.strategies.torch"
_TENSOR = (_METADATA, "TensorStorageMetadata")
_RECORDS = {
    _TENSOR, *((_METADATA, name) for name in ("Metadata", "TensorProperties", "ChunkStorageMetadata",
                                              "BytesStorageMetadata", "MetadataIndex", "StorageMeta")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"), (_LEGACY, "TensorProperties"),
    *((_PLANNER, name) for name in ("SavePlan", "WriteItem", "TensorWriteData")),
    *((_MEGATRON, name) for name in ("MCoreMetadata", "MCoreSavePlan")),
}  # fmt: skip
_VALUES = {
    ("torch", "Size"), ("torch.serialization", "_get_layout"),
    *(("pathlib" + part, name) for part in ("", "._local") for name in ("PosixPath", "Path")),  # as of Python 3.13
    (_METADATA, "_MEM_FORMAT_ENCODING"), (_LEGACY, "MEM_FORMAT_ENCODING"), (_PLANNER, "WriteItemType"),
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
}  # fmt: skip
_BUILTIN = {("collections", "OrderedDict"), ("builtins", "set"), ("builtins", "list"), ("builtins", "dict"),
            ("builtins", "slice")}
"""Written in C, so that no pickle can change them."""


class _Sealed(type):
    def __setattr__(cls, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"it wants to change the class {cls.__name__}")


class _Record(metaclass=_Sealed):
    """Stands for a dataclass: takes any state, runs nothing."""

    def __new__(cls, *_arguments: object) -> _Record:
        return object.__new__(cls)

    def __setstate__(self, state: object) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {})


class _Value(tuple, metaclass=_Sealed):
    """Stands for what is made by a call and shared afterwards, so that it has no state to set."""

    __slots__ = ()

    def __new__(cls, *arguments: object) -> _Value:
        return super().__new__(cls, arguments[0] if len(arguments) == 1 and isinstance(arguments[0], tuple)
                               else arguments)


class _MetadataReader(pickle.Unpickler):
    """Makes stand-ins of the named classes. What it accepts, torch's unpickler reads without calling anything else."""

    kinds: dict[tuple[str, str], type] = {pair: _Sealed(pair[1], (_Record,), {}) for pair in _RECORDS} | {
        pair: _Sealed(pair[1], (_Value,), {"__slots__": ()}) for pair in _VALUES}

    def find_class(self, module: str, name: str):
        if (module, name) in _BUILTIN:
            return super().find_class(module, name)
        if (module, name) not in self.kinds:
            raise pickle.UnpicklingError(f"it wants to call {module}.{name}")
        return self.kinds[module, name]


def read(path: Path, *, tensors_only: bool = True) -> Held:
    """The tensors of a `.metadata` file.

    Args:
        tensors_only: whether anything else is refused; otherwise it is left out, and must not be asked for.

    Raises:
        CheckpointError: not the index of tensors that it should be.
    """
    with _reading(path) as index:
        entries = {str(name): (type(entry), tuple(getattr(entry, "size", ())))
                   for name, entry in index.state_dict_metadata.items()}
    if not tensors_only:
        entries = {name: one for name, one in entries.items() if one[0] is _MetadataReader.kinds[_TENSOR]}
    for name, (kind, shape) in entries.items():
        if kind is not _MetadataReader.kinds[_TENSOR] or not all(isinstance(size, int) for size in shape):
            raise CheckpointError("the checkpoint holds something other than tensors", got=name, who=str(path),
                                  fix="use a checkpoint written by Miles", code="checkpoint-not-only-tensors")
    return {name: shape for name, (_, shape) in entries.items()}


def places(path: Path) -> list[tuple[Path, int, int]]:
    """File, first byte and size of everything that a `.metadata` file tells of, in the order of the files.

    Raises:
        CheckpointError: it cannot be read, or leads out of its folder.
    """
    with _reading(path) as index:
        stored = sorted((str(one.relative_path), max(0, one.offset), max(0, one.length))
                        for one in (index.storage_data or {}).values())
    if wrong := [name for name, _, _ in stored if Path(name).name != name]:
        raise CheckpointError("the checkpoint's index refers to files outside its folder",
                              code="checkpoint-index-escapes-folder", got=wrong[0], who=str(path),
                              fix="do not load checkpoints from untrusted sources")
    return [(path.parent / name, begin, size) for name, begin, size in stored]


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[Any]:
    try:
        with open(path, "rb") as file:
            yield _MetadataReader(file).load()
    except Exception as error:
        raise CheckpointError("the checkpoint's index cannot be trusted or read", code="checkpoint-index-unreadable",
                              who=str(path), got=(str(error).strip() or type(error).__name__).splitlines()[0][:300],
                              fix="use another iteration; do not load checkpoints from untrusted sources") from error
