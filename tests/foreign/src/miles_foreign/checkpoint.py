"""Checkpoints: iter_NNNNNNN/ with weights, optimizer and the run's state, and the tracker that names the last."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from miles_core.errors import CheckpointError
from miles_core.record.publish import publish, write_text
from miles_core.types import TRACKER

if TYPE_CHECKING:
    from miles_core.types import Batch


def save(folder: Path, rollout_id: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer,
         state: Mapping[str, Any]) -> None:
    """Write what `load` reads; what was complete before stays so until this is.

    Raises:
        CheckpointError: the disk is full or cannot be written.
    """
    with publish(folder / f"iter_{rollout_id:07d}") as temporary:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, temporary / "torch.pt")
        (temporary / "state.json").write_text(json.dumps(state), encoding="utf-8")
    write_text(folder / TRACKER, f"{rollout_id}\n")


def load(folder: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, dict[str, Any]] | None:
    """Fill both from the checkpoint that the tracker names: (first rollout to do, state), or None where none is.

    Raises:
        CheckpointError: it cannot be read, or is of another model.
    """
    tracker = Path(folder, TRACKER)
    if not tracker.is_file():
        return None
    rollout_id = int(tracker.read_text(encoding="utf-8"))
    where = Path(folder, f"iter_{rollout_id:07d}")
    try:
        kept = torch.load(where / "torch.pt", weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        return rollout_id, json.loads((where / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError("the checkpoint cannot be read, or is of another model", got=str(error).split("\n")[0],
                              who=str(where), fix="take an earlier one, or start anew without --load") from error


def export(folder: Path, model: Any, tensors: Mapping[str, torch.Tensor], source: str) -> None:
    """Write a Hugging Face directory, with the tokenizer of `source`.

    Raises:
        CheckpointError: the disk is full or cannot be written.
    """
    with publish(folder, beside=False) as temporary:
        model.save_pretrained(temporary, state_dict=dict(tensors))
        for path in Path(source).glob("*token*"):
            shutil.copy(path, temporary)


def hashes(stream: Iterable[tuple[str, torch.Tensor]], batch: Batch) -> dict[str, dict[str, str]]:
    """Of every weight, and of every column over all samples: equal ones mean equal bits."""
    weights = {name: _hash([tensor.cpu().numpy()]) for name, tensor in stream}
    names = sorted({name for sample in batch.samples for name in sample.columns})
    columns = {name: _hash(sample.columns.get(name) for sample in batch.samples) for name in names}
    return {"weights": weights, "batch": columns}


def _hash(arrays: Iterable[np.ndarray | None]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(b"none" if array is None else f"{array.dtype} {array.shape}".encode() + array.tobytes())
    return digest.hexdigest()[:16]
