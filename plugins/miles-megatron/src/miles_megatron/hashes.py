"""Hashes of every tensor and of every column, for --debug-determinism: what `miles diff` names a difference by.

A hash covers dtype, shape and bytes, and nothing that differs from process to process: equal hashes mean equal bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from miles_core.types import Sample

DIGITS = 16
"""Hexadecimal digits that are kept of a SHA-256: 64 bits."""


def tensor_hashes(stream: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Name -> hash, in the order of the stream; one tensor at a time is copied to the host.

    Args:
        stream: (name, tensor) of any shape, dtype and device; a name comes once.
    """
    hashes = {}
    for name, tensor in stream:
        digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        # As bytes, because numpy knows no bfloat16; flat, because a scalar cannot be viewed as another dtype.
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        hashes[name] = digest.hexdigest()[:DIGITS]
    return hashes


def column_hashes(samples: Sequence[Sample]) -> dict[str, str]:
    """Column -> hash over all samples in their order, sorted by name; "reward" stands for the combined rewards.

    A column that only some samples have is hashed together with who has it.
    """
    names = sorted({name for sample in samples for name in sample.columns})
    hashes = {name: _array_hash(sample.columns.get(name) for sample in samples) for name in names}
    hashes["reward"] = _array_hash(None if s.reward is None else np.float64(s.reward) for s in samples)
    return hashes


def _array_hash(arrays: Iterable[np.ndarray | np.float64 | None]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        if array is None:
            digest.update(b"none ")
            continue
        array = np.asarray(array)
        digest.update(f"{array.dtype.str} {array.shape} ".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()[:DIGITS]
