"""A cache of what was read from the source of an installed package: JSON in the user's cache folder.

A cache that cannot be read or written is rebuilt or ignored without a word: it is never needed.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path


def cached(name: str, stamp: int, make: Callable[[], dict]) -> dict:
    """What `make` returned, plain data, or a stored copy of it that carries the same stamp."""
    path = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "miles" / f"{name}.json"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["stamp"] == stamp:
            return stored
    made = {"stamp": stamp, **make()}
    _write(path, made)
    return made


def stamp(files: Iterable[Path]) -> int:
    """A checksum of the files that are read and of their reader: either may change while a version does not."""
    checksum = 0
    for file in files:
        # A missing file is for the reader to report, with a sentence.
        checksum = zlib.crc32(file.read_bytes() if file.is_file() else file.name.encode(), checksum)
    return checksum


def _write(path: Path, data: dict) -> None:
    """Publishes by rename, so that a reader sees a whole file or none."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(data), encoding="utf-8")
        os.replace(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
