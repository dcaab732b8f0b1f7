"""Scan: which plugins are there. One pass over the installed distributions; nothing is imported."""

from __future__ import annotations

import configparser
import functools
import glob
import json
import os
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

GROUP = "miles.plugins"
_CORE = re.compile(r"^Requires-Dist: miles[-_.]core\s*(?:\[[^]]*\])?\s*\(?([^;()\n]*)\)?$", re.MULTILINE)

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


@dataclass(frozen=True, slots=True)
class Installed:
    """A plugin found in an installed distribution.

    Args:
        info: the folder of the distribution's metadata, NAME-VERSION.dist-info.
    """

    name: str
    entry: str
    distribution: str
    version: str
    info: Path

    @property
    def official(self) -> bool:
        """Whether it is one of Miles's own plugins."""
        return self.name in KNOWN and self.distribution == f"miles-{self.name}"

    @property
    def editable(self) -> bool:
        """Whether it is installed from a checkout, whose files may change."""
        direct = self.info / "direct_url.json"
        return direct.is_file() and bool(json.loads(direct.read_bytes()).get("dir_info", {}).get("editable"))

    def unmet(self) -> str | None:
        """What it requires of miles-core, where this is another version; pip can be told not to look."""
        from miles_core import __version__

        headers = (self.info / "METADATA").read_text(encoding="utf-8").partition("\n\n")[0]
        core = needs[1].strip() if (needs := _CORE.search(headers)) else ""
        if not core or core[:2] in ("~=", ">=", "==") and core[2:] == __version__:
            return None
        from packaging.specifiers import SpecifierSet  # 20 ms, which most plans save

        return None if SpecifierSet(core).contains(__version__, prereleases=True) else f"miles-core{core}"


def installed() -> list[Installed]:
    """Every entry point of the group, sorted by name; one distribution seen twice on sys.path counts once.

    importlib.metadata.entry_points would parse those of all that is installed, and its import costs as much as a scan.
    """
    return list(_installed(tuple((folder or ".", _changed(folder or ".")) for folder in sys.path)))


def _changed(path: str) -> int | None:
    return os.stat(path).st_mtime_ns if os.path.exists(path) else None


@functools.lru_cache(maxsize=1)
def _installed(stamp: tuple[tuple[str, int | None], ...]) -> list[Installed]:
    plugins: dict[str, list[Installed]] = {}
    for info in (f"{folder}/{one}" for folder, _ in stamp for one in glob.iglob("*.dist-info", root_dir=folder)):
        distribution, _, version = os.path.basename(info).removesuffix(".dist-info").partition("-")
        distribution = re.sub(r"[-_.]+", "-", distribution).lower()
        if distribution not in plugins:
            plugins[distribution] = [Installed(name, entry, distribution, version, Path(info))
                                     for name, entry in _entries(info).items()]
    return sorted(sum(plugins.values(), []), key=lambda item: (item.name, item.distribution))


def _entries(info: str) -> dict[str, str]:
    """Entry points of the group in a distribution, whose file of them is configparser's with names in their own case;
    none while pip is still writing its metadata."""
    try:
        with open(f"{info}/entry_points.txt", encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError:
        return {}
    if GROUP not in text or not os.path.isfile(f"{info}/METADATA"):
        return {}
    stated = configparser.ConfigParser(delimiters="=", interpolation=None, strict=False)
    stated.optionxform = str  # type: ignore[assignment,method-assign]
    stated.read_string(text)
    return dict(stated[GROUP]) if GROUP in stated else {}
