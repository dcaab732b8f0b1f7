"""Whether a checkpoint was written, and still is what was: a bit that flipped on a disk is no reason to train on it.

torch writes every tensor as a zip archive with a CRC-32 of each member, and does not look at them when it reads. They
are looked at here, before anything is loaded; the run's own state has a digest of ours.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from miles_core.errors import CheckpointError
from miles_core.record.publish import write_error

ZIP = b"PK\x03\x04"
_BROKEN = (zipfile.BadZipFile, zlib.error, OSError, RuntimeError, NotImplementedError, ValueError, EOFError)
"""What zipfile raises of archives in which anything but the data is wrong."""


def check_archives(pieces: Iterable[tuple[Path, int, int | None]]) -> None:
    """
    Args:
        pieces: file, first byte and size of each archive in it; None: all of the file.

    Raises:
        CheckpointError: one of them is not what was written; names the file and where in it.
    """
    for path, begin, size in pieces:
        with open(path, "rb") as file:
            file.seek(begin)
            data = file.read(size)
        if size is not None and len(data) != size or data.startswith(ZIP) and _damaged(data):
            raise CheckpointError("the checkpoint cannot be read: bytes of it are not those that were written",
                                  got=f"{len(data)} bytes from {begin} on", who=str(path),
                                  fix="check the disk, and use an earlier iteration", code="checkpoint-bytes-changed")


def _damaged(data: bytes) -> bool:
    try:
        return zipfile.ZipFile(io.BytesIO(data)).testzip() is not None
    except _BROKEN:
        return True


def digest(state: Mapping[str, object]) -> str:
    """Of the run's own state, as it is read from JSON: keys are text there, and sorted as such."""
    return hashlib.sha256(json.dumps(json.loads(json.dumps(state)), sort_keys=True).encode()).hexdigest()


def check_state(state: Mapping[str, object], written: object, path: Path) -> None:
    """
    Args:
        written: the digest in the file. One without, as others write, is taken as it is.

    Raises:
        CheckpointError: the state is not what was written.
    """
    if written is not None and written != digest(state):
        raise CheckpointError("the run's own state cannot be read: it is not what was written", who=str(path),
                              fix="check the disk, and use an earlier iteration", code="checkpoint-state-changed")


@contextlib.contextmanager
def write_errors(target: Path) -> Iterator[None]:
    """Translate a failed write, as torch and Megatron-core report it, back into its original error.

    An OSError arrives as the text of a RuntimeError in a collective error; torch's zip writer reports any failed
    write as an "unexpected pos".
    """
    try:
        yield
    except (CheckpointException, RuntimeError, SafetensorError) as error:
        text = str(error)
        if errno := re.search(r"(?:\[Errno |\(os error )(\d+)[^\n]*", text):
            raise write_error(target, OSError(int(errno[1]), errno[0])) from error
        if "unexpected pos" in text or "PytorchStreamWriter" in text:
            raise CheckpointError("the disk is full or failing", code="checkpoint-disk-failing", who=str(target),
                                  fix="free some space; earlier checkpoints are intact") from error
        raise
