"""Presets: named lists of plugins and values that a plugin's manifest offers, printed expanded in the plan.

    presets = {"dapo": {"plugins": ["grpo", "dapo-filter"], "values": {"algorithm.eps_clip_high": 0.28}}}

in a plugin's class body. A preset stands behind the run file and flags: both overrule what it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from miles_core.errors import ConfigError, OwnerError, did_you_mean
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
    plugins: tuple[str, ...]
    values: dict[str, object]

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
    manifests = readable() if names else []
    return [_one(name, origin, manifests) for name, origin in names]


def _one(name: str, origin: str, manifests: Sequence[Manifest]) -> Preset:
    owners = [one for one in manifests if name in one.presets]
    if len(owners) > 1:
        raise OwnerError(f"two plugins offer the preset {name!r}: {owners[0].name} and {owners[1].name}",
                         code="preset-offered-twice", who=origin,
                         fix="uninstall one of them, or write out the preset's values")
    if not owners:
        names = sorted({preset for one in manifests for preset in one.presets})
        known = [plugin for plugin, offers in KNOWN.items() if f"preset:{name}" in offers]
        raise ConfigError(f"unknown preset {name!r}", code="preset-unknown", who=origin,
                          got=f"there are {', '.join(names) or 'none'}",
                          fix=f"pip install miles-{known[0]}" if known else did_you_mean(name, names)
                          or "a plugin offers presets: `miles plugins info NAME`")
    plugin, stated = owners[0], owners[0].presets[name]
    if not isinstance(stated, dict) or set(stated) - {"plugins", "values"}:
        raise ConfigError(f"the preset {name!r} of plugin {plugin.name!r} cannot be read", code="preset-unreadable",
                          got=repr(stated)[:100], who=plugin.plugin,
                          fix='write {"plugins": [...], "values": {"table.key": value}}')
    return Preset(name, plugin.name, tuple(stated.get("plugins", ())), dict(stated.get("values", {})))
