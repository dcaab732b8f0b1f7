"""What is installed where: processes of one run on several machines must be the same code."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import miles_core
from miles_core.errors import ConfigError
from miles_core.plugins.scan import installed

NEEDED = ("miles-core", "torch", "megatron-core", "transformers", "ray")
WHERE_PRESENT = ("sglang", "transformer-engine")
"""A node without GPUs may do without these; two versions of them may not meet."""

ABSENT = "none"
SHOWN = 3
"""Differences that an error tells one by one."""


def here(plugins: Sequence[str] = ()) -> dict[str, str]:
    """Version by name of what matters to a run; the files of miles_core and of plugins by digests.

    Args:
        plugins: as the run names them.
    """
    installed_versions = {"host": platform.node(), "python": ".".join(platform.python_version_tuple()[:2])}
    installed_versions |= {name: _version(name) for name in (*NEEDED, *WHERE_PRESENT)}
    installed_versions |= _source()
    named = {one.name: f"{one.distribution} {one.version}" for one in installed()}
    for plugin in plugins:
        short = plugin.rpartition(":")[2].removeprefix("miles-plugin-").removeprefix("miles-")
        version = _digest(Path(plugin)) if plugin.endswith(".py") else named.get(short, ABSENT)
        installed_versions[f"plugin {plugin}"] = version
    return installed_versions


def check(name: str, ours: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Compare what a process has with what the driver has.

    Args:
        name: the process.
        theirs: of `here` there, with its host under "host".

    Raises:
        ConfigError: names the host, and what differs there.
    """
    differing = []
    for package in dict.fromkeys([*ours, *theirs]):
        pair = (theirs.get(package, ABSENT), ours.get(package, ABSENT))
        if pair[0] != pair[1] and package != "host" and not (package in WHERE_PRESENT and ABSENT in pair):
            differing.append((package, *pair))
    if differing:
        more = f" and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
        verb = "are" if len(differing) > 1 else "is"
        raise ConfigError(
            f"{', '.join(package for package, *_ in differing[:SHOWN])}{more} {verb} not the same on every host",
            who=f"{name} on {theirs.get('host', '?')}", fix="install the same packages on every node",
            got="; ".join(f"{package}: {remote} there, {local} at the driver"
                          for package, remote, local in differing[:SHOWN]), code="versions-differ-across-hosts")


def _version(name: str) -> str:
    """Without the local part: builds for CPU and CUDA of one release are the same to a run."""
    try:
        return importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return ABSENT


@functools.cache
def _source() -> dict[str, str]:
    """Digest of each Python file of miles_core: an edited checkout has the version of the one it was made from."""
    root = Path(miles_core.__file__).parent
    return {path.relative_to(root.parent).as_posix(): _digest(path) for path in sorted(root.rglob("*.py"))}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.is_file() else ABSENT
