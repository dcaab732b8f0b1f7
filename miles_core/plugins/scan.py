"""Scan: which plugins are there. One pass over the installed distributions; nothing is imported."""

from __future__ import annotations

import functools
import glob
import importlib.metadata
import json
import os
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

GROUP = "miles.plugins"
_CORE = re.compile(r"miles[-_.]core\s*(?:\[[^]]*\])?\s*\(?([^;()]*)\)?")

BUILT_IN = {"core": "miles_core.stages.defaults"}
"""The core's own parts, through the same door; always there, imported only when a run needs them."""

OFFICIAL = Path(__file__).with_name("official.toml")
"""What is known of the official plugins without having them installed; generated from their manifests."""

_OFFICIAL = tomllib.loads(OFFICIAL.read_text(encoding="utf-8"))

KNOWN: Mapping[str, tuple[str, ...]] = {name: tuple(offers) for name, offers in _OFFICIAL["offers"].items()}
"""Official plugins and what they offer, so that an error can name the one to install or to enable."""

CALLED_FOR: Mapping[str, str] = _OFFICIAL["called_for"]
"""Official plugins that a run gets for an option that it sets, or for what config.json says that its engine's weights
are quantised by."""

DEFAULTS: tuple[str, ...] = tuple(_OFFICIAL["default"])
"""Official plugins that take part in every run where they are installed, in this order: trainers, engines, checks. They
are imported only where a run needs one of their parts."""


def offering(hook: str) -> list[str]:
    """Official plugins that implement a hook."""
    return [name for name, offers in KNOWN.items() if any(offer.partition(":")[0] == hook for offer in offers)]


@dataclass(frozen=True, slots=True)
class Installed:
    """A plugin found in an installed distribution.

    Args:
        editable: it is installed from a checkout, whose files may change.
        core: what the distribution requires of miles-core, "~=0.1.0" or nothing.
    """

    name: str
    entry: str
    distribution: str
    version: str
    editable: bool = False
    core: str = ""

    @property
    def official(self) -> bool:
        """Whether it is one of Miles's own plugins."""
        return self.name in KNOWN and self.distribution == f"miles-{self.name}"

    def unmet(self) -> str | None:
        """What it requires of miles-core, where this is another version; pip can be told not to look."""
        from miles_core import __version__

        if not self.core or self.core[:2] in ("~=", ">=", "==") and self.core[2:] == __version__:
            return None
        from packaging.specifiers import SpecifierSet  # 20 ms, which most plans save

        return None if SpecifierSet(self.core).contains(__version__, prereleases=True) else f"miles-core{self.core}"


def installed() -> list[Installed]:
    """Every entry point of the group, sorted by name; one distribution seen twice on sys.path counts once."""
    return list(_installed(tuple((folder, _changed(folder or ".")) for folder in sys.path)))


def _changed(path: str) -> int | None:
    return os.stat(path).st_mtime_ns if os.path.exists(path) else None


@functools.lru_cache(maxsize=1)
def _installed(_stamp: tuple[tuple[str, int | None], ...]) -> list[Installed]:
    plugins = {}
    for entry in importlib.metadata.entry_points(group=GROUP):
        stated, direct = _headers(entry.dist), entry.dist.read_text("direct_url.json")
        if not {"Name", "Version"} <= stated.keys():
            continue  # pip is writing it at this moment
        distribution = re.sub(r"[-_.]+", "-", stated["Name"][0]).lower()
        editable = bool(direct and json.loads(direct).get("dir_info", {}).get("editable"))
        needs = (_CORE.fullmatch(one) for one in stated.get("Requires-Dist", ()))
        plugins.setdefault((entry.name, distribution), Installed(
            entry.name, entry.value, distribution, stated["Version"][0], editable,
            next((one[1].strip() for one in needs if one), "")))
    return sorted(plugins.values(), key=lambda item: (item.name, item.distribution))


def _headers(distribution: importlib.metadata.Distribution) -> dict[str, list[str]]:
    """Of its metadata, which email.parser takes a third of a plan's start to read."""
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    headers: dict[str, list[str]] = {}
    for name, value in re.findall(r"^([A-Z][\w-]*): (.*)$", text.partition("\n\n")[0], re.MULTILINE):
        headers.setdefault(name, []).append(value)
    return headers


def look_again() -> None:
    """Let `installed` see metadata that are rewritten where they are, as with a new version."""
    _forget(tuple(_changed(path) for folder in sys.path for path in glob.iglob(f"{folder}/*.dist-info/METADATA")))


@functools.lru_cache(maxsize=1)
def _forget(_stamp: tuple[int | None, ...]) -> None:
    _installed.cache_clear()
