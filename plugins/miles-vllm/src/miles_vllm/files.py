"""Files: a version's weights in a folder that the trainer, or the engine for it, writes and the servers read.

A folder is complete or not there. Beside the tensors it has a sum of each, which servers compare with what they read.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from miles_core.errors import CheckpointError, SyncError
from miles_core.record.publish import publish
from miles_vllm.server_extension.miles_vllm_worker import SUMS, digest

if TYPE_CHECKING:
    import torch

    from miles_core.config import RunConfig


def write(folder: Path, stream: Iterable[tuple[str, torch.Tensor]], checkpoint: Path, limit: int) -> dict[str, float]:
    """Write a whole stream into `folder`; "tensors" and "bytes" of it.

    Args:
        folder: PARENT/version-N; what an earlier version beside it has, this one has to have.
        checkpoint: the Hugging Face folder that the servers started from.
        limit: bytes of tensors that are in memory at a time, and in a file.

    Raises:
        SyncError: a tensor has another shape in the checkpoint, or the stream lacks one; nothing is written then.
        CheckpointError: from an OSError.
    """
    from safetensors.torch import save_file

    shapes = dict(_shapes(checkpoint))
    before = {name for other in folder.parent.glob(f"version-*/{SUMS}") for name in json.loads(other.read_text())}
    sums: dict[str, str] = {}
    pending: dict[str, torch.Tensor] = {}
    size = total = 0
    with publish(folder, beside=False) as at:
        def flush() -> None:
            if pending:
                save_file(pending, at / f"weights-{len(sums):06d}.safetensors")
                pending.clear()

        for name, tensor in stream:
            if name in shapes and tuple(tensor.shape) != shapes[name]:
                raise SyncError(f"{name} does not have its shape in the checkpoint", got=f"{tuple(tensor.shape)}",
                                who=str(checkpoint), fix=f"send {shapes[name]}", code="vllm-weights-misshapen")
            pending[name] = tensor.detach().to("cpu", copy=True).contiguous()  # others may be cut from the same memory
            sums[name] = digest(pending[name])
            size += pending[name].nbytes
            total += pending[name].nbytes
            if size >= limit:
                flush()
                size = 0
        flush()
        if left := lacking(set(sums), set(shapes)) or sorted(before - sums.keys()):
            raise SyncError("the stream of weights is not whole", got=f"without {', '.join(left[:5])}",
                            who=str(checkpoint), fix="send every tensor of the model", code="vllm-weights-missing")
        (at / SUMS).write_text(json.dumps(sums))
    return {"tensors": len(sums), "bytes": total}


def discard_others(folder: Path) -> None:
    """Remove the versions beside this one."""
    for other in folder.parent.glob("version-*"):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)


def lacking(sent: set[str], checkpoint: set[str]) -> list[str]:
    """Names of the checkpoint that a stream lacks, though it has others of their kind or is empty.

    Kinds that are never sent, as buffers and layers for multi-token prediction, the trainer may not have. Whether every
    parameter of the server was loaded into, the server says.
    """
    kinds = {re.sub(r"\d+", "#", name) for name in sent}
    return sorted(name for name in checkpoint - sent if not sent or re.sub(r"\d+", "#", name) in kinds)


def _shapes(checkpoint: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of the tensors in a folder's safetensors, from their headers."""
    for path in sorted(checkpoint.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                shapes = [(name, tuple(file.get_slice(name).get_shape())) for name in file.keys()]  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise CheckpointError("the header of a file of weights cannot be read", who=str(path), got=error,
                                  fix="use a checkpoint that is whole", code="vllm-checkpoint-unreadable") from error
        yield from shapes


def checkpoint_of(config: RunConfig) -> Path:
    """The Hugging Face folder that the servers start from."""
    return Path(str(config.checkpoint.hf_checkpoint))


def weights_folder(config: RunConfig) -> Path:
    """Where a version's files are: --update-weight-disk-dir, else in the run directory."""
    return Path(config.perf.update_weight_disk_dir or Path(str(config.checkpoint.run_dir)) / "weights").resolve()
