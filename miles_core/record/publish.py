"""Folders that exist completely or not at all: written under a temporary name, flushed to disk, then renamed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from miles_core.errors import CheckpointError
from miles_core.record.directory import FULL, make_folder, sync

TEMPORARY = ".tmp-"
"""Prefix of folders that were never published; they are never read, and the next `publish` beside them clears them."""

_HERE, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE


@contextlib.contextmanager
def publish(target: Path, *, writer: bool = True, beside: bool = True) -> Iterator[Path]:
    """Give a temporary folder to write in and turn it into `target` when the block ends well.

    An existing target is replaced, and is there until its successor is complete on disk; a link stays, and is followed.

    Args:
        writer: whether this process makes, publishes and clears the folder; other ranks only write into it.
        beside: whether all that lies unpublished beside the target is cleared, or only what is in the way: in a folder
            that others use as well it may be theirs.

    Raises:
        CheckpointError: from an OSError; what was published before is untouched.
    """
    target = target.resolve() if target.is_symlink() else target
    temporary = target.parent / f"{TEMPORARY}{target.name}"
    try:
        if writer:
            make_folder(target.parent)
            if beside:
                clear(target.parent)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
        yield temporary
        if writer:
            sync_all(temporary)
            replace_folder(temporary, target)
    except BaseException as error:
        if writer:
            shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise write_error(target, error) from error
        raise


def clear(parent: Path) -> None:
    """Remove what an interrupted `publish` left beside; a folder whose successor never came gets its name back."""
    for stale in parent.glob(f"{TEMPORARY}*"):
        target = parent / stale.name.removeprefix(f"{TEMPORARY}replaced-")
        if aside(target) == stale and not target.exists():
            os.rename(stale, target)
            sync(parent)
        elif stale.is_dir():
            shutil.rmtree(stale, ignore_errors=True)
        else:
            stale.unlink(missing_ok=True)


def write_text(target: Path, text: str) -> None:
    """Write a small file so that a reader sees the old text or the new one, never a part."""
    temporary = target.parent / f"{TEMPORARY}{target.name}"
    try:
        temporary.write_text(text)
        sync(temporary)
        os.rename(temporary, target)
        sync(target.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise write_error(target, error) from error


def sync_all(folder: Path) -> None:
    """Flush every file of a folder, and the folder itself, to disk."""
    for where, _, files in os.walk(folder):
        for name in files:
            sync(Path(where, name))
        sync(where)


def replace_folder(source: Path, target: Path) -> None:
    """Rename source to target. A folder cannot be renamed over a filled one, so the two swap their names.

    Where the file system cannot do that (NFS), the old one steps aside first, and `aside` is where it may be found.
    """
    old = source
    if not target.exists():
        os.rename(source, target)
    elif not exchange(source, target):
        old = aside(target)
        shutil.rmtree(old, ignore_errors=True)
        os.rename(target, old)
        os.rename(source, target)
    sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def aside(target: Path) -> Path:
    """Where a folder lies between the two renames that replace it, on file systems that cannot exchange names."""
    return target.parent / f"{TEMPORARY}replaced-{target.name}"


def exchange(one: Path, other: Path) -> bool:
    """Let two folders swap their names in one step; False where this system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    if libc.renameat2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
        return True
    if (number := ctypes.get_errno()) in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def write_error(target: Path, error: OSError) -> CheckpointError:
    """What went wrong with a write, as a CheckpointError."""
    full = error.errno in FULL
    return CheckpointError("the disk is full" if full else "a checkpoint could not be written",
                           code="checkpoint-not-written", got=None if full else str(error), who=str(target),
                           fix=f"{'free some space' if full else 'make it writable'}; earlier checkpoints are intact")
