"""Digests of what a plugin is made of: its code, wherever it was installed from, without importing it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from miles_core.errors import ConfigError
from miles_core.plugins.manifest import folder_of
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
    folder = folder_of(where)
    return "missing" if folder is None else _of_files(folder, folder.rglob("*"))


def core() -> str:
    """Of every file of miles_core: an edited checkout has the version of the one it was made from."""
    return _of_files(PACKAGE, PACKAGE.rglob("*"))


def _of_files(root: Path, files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    files = [path for path in sorted(files) if path.is_file()]
    if not files:
        return "missing"
    for path in files:
        if "__pycache__" not in path.parts:
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:SHOWN]


def proof(selected: Sequence[Selected]) -> dict[str, str]:
    """What this process runs, by its own files: version and digest of the core and of each plugin."""
    digests = {"miles-core": core()}
    for one in selected:
        if one.source != "built-in":  # its version here, which the plan cannot know of another host
            version = "" if one.source == "file" else f" {installed_version(one.source) or 'missing'}"
            digests[f"plugin {one.manifest.name}"] = f"{one.source}{version} {of(one)}"
    return digests


def check(expected: Mapping[str, str], selected: Sequence[Selected], who: str) -> None:
    """Whether this process runs what the driver planned.

    Args:
        expected: the driver's `proof`.
        who: this process, with its host.

    Raises:
        ConfigError: names the process, and each package of which it has another version or other code.
    """
    mine = proof(selected)
    differing = [f"{name}: {mine.get(name)} here, {theirs} at the driver" for name, theirs in expected.items()
                 if mine.get(name) != theirs]
    if differing:
        raise ConfigError("this process would run other code than the plan's", code="code-differs-from-plan",
                          got="; ".join(differing), who=who, fix="install the same packages on every host")


def installed_version(distribution: str) -> str | None:
    """The version of a distribution; None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
