"""Tensors of a checkpoint's safetensors files, by name."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from miles_core.errors import CheckpointError


class Readers:
    """Reads tensors by name and keeps each file open once."""

    def __init__(self, files: dict[str, Path]):
        self._files, self._open = files, {}

    def __enter__(self) -> Readers:
        return self

    def __exit__(self, *_exc) -> None:
        self._open.clear()

    def _reader(self, name: str):
        file = self._files[name]
        if file not in self._open:
            self._open[file] = _open(file)
        return self._open[file]

    def shape(self, name: str) -> list[int]:
        try:
            return list(self._reader(name).get_slice(name).get_shape())
        except SafetensorError as error:
            raise CheckpointError(f"the index places {name} in a file that lacks it", who=str(self._files[name]),
                                  fix="fetch the checkpoint again", code="index-misplaces-tensor") from error

    def tensor(self, name: str) -> torch.Tensor:
        return self._reader(name).get_tensor(name)

    def row(self, name: str, number: int) -> torch.Tensor:
        """One entry along a tensor's first axis, the others unread."""
        return self._reader(name).get_slice(name)[number]


def _open(file: Path):
    try:
        return safe_open(file, "pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError("a tensor file cannot be read", got=str(error), who=str(file),
                              fix="fetch the checkpoint again", code="tensor-file-unreadable") from error
