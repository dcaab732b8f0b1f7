"""Folders that exist completely or not at all: written under a temporary name, flushed to disk, then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from miles_core.errors import CheckpointError

TEMPORARY = ".tmp-"
"""Prefix of folders that were never published; nobody reads them and the next `publish` beside them clears them."""


@contextlib.contextmanager
def publish(target: Path, *, writer: bool = True, beside: bool = True) -> Iterator[Path]:
    """Give a temporary folder to write in and turn it into `target` when the block ends well.

    An existing target is replaced, and is there until its successor is complete on disk.

    Args:
        writer: whether this process makes, publishes and clears the folder; other ranks only write into it.
        beside: whether all that lies unpublished beside the target is cleared, or only what is in the way: in a folder
            that others use as well it may be theirs.

    Raises:
        CheckpointError: from an OSError; what was published before is untouched.
    """
    temporary = target.parent / f"{TEMPORARY}{target.name}"
    try:
        if writer:
            target.parent.mkdir(parents=True, exist_ok=True)
            if beside:
                clear(target.parent)
            discard(temporary)
            temporary.mkdir()
        yield temporary
        if writer:
            sync(temporary)
            replace_folder(temporary, target)
    except OSError as error:
        discard(temporary, writer)
        raise write_error(target, error) from error
    except BaseException:
        discard(temporary, writer)
        raise


def discard(folder: Path, writer: bool = True) -> None:
    """Remove a folder that was never published, or no longer is; a failure to do so is nobody's business."""
    if writer:
        shutil.rmtree(folder, ignore_errors=True)


def clear(parent: Path) -> None:
    """Remove what an interrupted `publish` left beside."""
    for stale in parent.glob(f"{TEMPORARY}*"):
        if stale.is_dir():
            discard(stale)
        else:
            stale.unlink(missing_ok=True)


def write_text(target: Path, text: str) -> None:
    """Write a small file so that a reader sees the old text or the new one, never a part."""
    temporary = target.parent / f"{TEMPORARY}{target.name}"
    try:
        with open(temporary, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, target)
        _sync_path(target.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise write_error(target, error) from error


def sync(folder: Path) -> None:
    """Flush every file of a folder, and the folder itself, to disk."""
    for where, _, files in os.walk(folder):
        for name in files:
            _sync_path(Path(where, name))
        _sync_path(Path(where))


def replace_folder(source: Path, target: Path) -> None:
    """Rename source to target. A folder cannot be renamed over a filled one, so that one steps aside first."""
    aside = None
    if target.exists():
        aside = target.parent / f"{TEMPORARY}replaced-{target.name}"
        os.rename(target, aside)
    os.rename(source, target)
    _sync_path(target.parent)
    if aside is not None:
        discard(aside)


def write_error(target: Path, error: OSError) -> CheckpointError:
    """What went wrong with a write, as a CheckpointError."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return CheckpointError(
        "the disk is full" if full else "a checkpoint could not be written",
        got=None if full else str(error),
        who=str(target),
        fix=("free some space" if full else "see that the folder can be written to")
        + "; checkpoints that were complete before still are",
    )


def _sync_path(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
