"""Presets: named lists of plugins and values that a plugin's manifest offers, printed expanded in the plan.

    presets = {"dapo": {"plugins": ["grpo", "dapo-filter"], "values": {"algorithm.eps_clip_high": 0.28}}}

in a plugin's class body. A preset stands behind the run file and flags: both overrule what it says.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field

from miles_core.errors import ConfigError, OwnerError
from miles_core.plugins.manifest import Manifest
from miles_core.plugins.scan import KNOWN
from miles_core.plugins.select import readable


@dataclass(frozen=True, slots=True)
class Preset:
    """What a name stands for.

    Args:
        plugin: who offers it; it need not take part itself.
        plugins: to be enabled, in this order.
        values: dotted key -> value.
    """

    name: str
    plugin: str
    plugins: tuple[str, ...] = ()
    values: dict[str, object] = field(default_factory=dict)

    @property
    def origin(self) -> str:
        """Who set a value, for the plan."""
        return f"preset {self.name} of plugin {self.plugin}"


def find(names: Sequence[tuple[str, str]]) -> list[Preset]:
    """The presets that a run names, in its order.

    Args:
        names: (name, who wrote it).

    Raises:
        ConfigError: no installed plugin offers one, or its statement cannot be read.
        OwnerError: two plugins offer one.
    """
    if not names:
        return []
    presets = offered()
    return [_one(name, origin, presets) for name, origin in names]


def offered() -> list[Preset]:
    """Every preset of the installed plugins that can be read."""
    presets = []
    for manifest in readable():
        try:
            presets += of_manifest(manifest)
        except ConfigError:  # of a plugin that nobody enabled
            continue
    return presets


def _one(name: str, origin: str, presets: Sequence[Preset]) -> Preset:
    matches = [one for one in presets if one.name == name]
    if len(matches) > 1:
        first, second = (one.plugin for one in matches[:2])
        raise OwnerError(f"two plugins offer the preset {name!r}: {first} and {second}", code="preset-offered-twice",
                         who=origin, fix="uninstall one of them, or write out the preset's values")
    if matches:
        return matches[0]
    known = [plugin for plugin, offers in KNOWN.items() if f"preset:{name}" in offers]
    near = difflib.get_close_matches(name, [one.name for one in presets], 1, 0.6)
    raise ConfigError(f"unknown preset {name!r}", code="preset-unknown", who=origin, got="there are "
                      + (", ".join(sorted(one.name for one in presets)) or "none"),
                      fix=f"pip install miles-{known[0]}" if known else f"did you mean {near[0]!r}?" if near else
                      "a plugin offers presets: `miles plugins info NAME`")


def of_manifest(manifest: Manifest) -> list[Preset]:
    """What one plugin offers.

    Raises:
        ConfigError: a preset that is not a table of plugins and values.
    """
    presets = []
    for name, stated in manifest.presets.items():
        if not isinstance(stated, dict) or set(stated) - {"plugins", "values"}:
            raise ConfigError(f"the preset {name!r} of plugin {manifest.name!r} cannot be read",
                              code="preset-unreadable", got=repr(stated)[:100], who=manifest.plugin,
                              fix='write {"plugins": [...], "values": {"table.key": value}}')
        presets.append(Preset(name, manifest.name, tuple(stated.get("plugins", ())), dict(stated.get("values", {}))))
    return presets
