"""Digests of what a plugin is made of: its code, wherever it was installed from, without importing it."""

from __future__ import annotations

import hashlib
import importlib.machinery
from collections.abc import Iterable
from pathlib import Path

from miles_core.plugins.select import PACKAGE, Selected

SHOWN = 12
"""Hexadecimal digits of a digest."""


def of(one: Selected) -> str:
    """Of every file of a plugin's top-level package, or of the single file; "" of a part of the core."""
    where = one.manifest.plugin.rpartition(":")[0]
    if where.endswith(".py"):
        return _of_files(Path(where).parent, [Path(where)])
    if one.source == "built-in":
        return ""
    spec = importlib.machinery.PathFinder.find_spec(where.partition(".")[0])
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    return _of_files(folders[0], folders[0].rglob("*")) if folders else "missing"


def core() -> str:
    """Of every file of miles_core: an edited checkout has the version of the one it was made from."""
    return _of_files(PACKAGE, PACKAGE.rglob("*"))


def _of_files(root: Path, files: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for path in sorted(files):
        if path.is_file() and "__pycache__" not in path.parts:
            found.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:SHOWN]
