"""Select: the plugins that a run names, in the order written. Installed never means active."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core.errors import ManifestError, OwnerError, UnknownPluginError, did_you_mean
from miles_core.plugins import manifest as manifests
from miles_core.plugins.manifest import Manifest
from miles_core.plugins.scan import BUILT_IN, DEFAULTS, KNOWN, Installed, installed

PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Selected:
    """A plugin that takes part in the run.

    Args:
        source: "built-in", "file" or the distribution's name.
        version: the distribution's version, or the digest of a single file.
        origin: who named it: "default", "flag", "file:line".
    """

    manifest: Manifest
    source: str
    version: str
    origin: str

    def __post_init__(self) -> None:
        if self.manifest.hookspecs:
            declare(self.manifest.hookspecs)

    @property
    def ours(self) -> bool:
        """Whether every run has it: it is not timed, and its errors speak for themselves."""
        return self.source == "built-in" or self.manifest.default


def built_in() -> list[Selected]:
    """The core's own parts, and the official plugins that every run has where they are installed."""
    from miles_core import __version__

    have = {one.name: one for one in installed()}
    parts = [Selected(manifests.of_source(PACKAGE.parent.joinpath(*module.split(".")).with_suffix(".py"), name=name,
                                          module=module), "built-in", __version__, "default")
             for name, module in BUILT_IN.items()]
    return parts + [Selected(manifest_of(have[name]), have[name].distribution, have[name].version, "default")
                    for name in DEFAULTS if name in have]


def declare(name: str) -> None:
    """Take the hooks of a package's own module of specifications, which its manifest names; it is light."""
    items = vars(importlib.import_module(name)).items()
    _specs[name] = {hook: item for hook, item in items if callable(item) and hasattr(item, "kind")}


_specs: dict[str, dict[str, Any]] = {}
declare("miles_core.hookspecs")


def all_specs() -> dict[str, Any]:
    """Every hook by name: the core's, in loop order, then those that plugins of every run and others have declared."""
    _declared()
    return {name: item for hooks in _specs.values() for name, item in hooks.items()}


_declared = functools.cache(built_in)
"""Once, for what is selected declares its hooks."""


def select(named: Sequence[tuple[str, str]], chosen: Sequence[Selected]) -> list[Selected]:
    """What is already chosen, then what is named here, in this order.

    Args:
        named: (plugin as written, who wrote it).

    Raises:
        UnknownPluginError: not installed, not found or misspelt.
        OwnerError: a plugin named twice, or one name in two distributions.
    """
    chosen, have = list(chosen), installed()
    lacking = {name: origin for text, origin in named if (name := short(text)) in KNOWN.keys() - {o.name for o in have}}
    if lacking:
        names, one = ", ".join(map(repr, lacking)), len(lacking) == 1
        raise UnknownPluginError(f"plugin {names} is not installed" if one else f"plugins {names} are not installed",
                                 code="plugins-missing", who=", ".join(dict.fromkeys(lacking.values())),
                                 fix=f"pip install {' '.join(f'miles-{name}' for name in lacking)}; `pip install "
                                 "miles` brings what most runs need")
    for text, origin in named:
        new = _find(text, origin, have)
        clash = next((old for old in chosen if old.manifest.name == new.manifest.name), None)
        if clash is not None and clash.origin == "default" and clash.source == new.source:
            chosen.remove(clash)  # a plugin of every run that is named takes the place where it is named
        elif clash is not None:
            raise OwnerError(f"two plugins are called {new.manifest.name!r}: {clash.source} ({clash.origin}) and "
                             f"{new.source} ({origin})", code="plugin-name-twice",
                             fix="name it once, or change the class attribute `name` in the file")
        chosen.append(new)
    return chosen


def readable(hook: str | None = None) -> list[Manifest]:
    """Manifests of the installed plugins, by name; none is imported. One that cannot be read is left out here.

    Args:
        hook: only of plugins that implement it.
    """
    stated = []
    for one in installed():
        known = KNOWN.get(one.name, ()) if one.official else None
        if hook is not None and not (manifests.mentions(one.entry, f'hook = "{hook}"') if known is None else
                                     any(offer.startswith(f"{hook}:") for offer in known)):
            continue
        try:
            stated.append(manifest_of(one))
        except ManifestError:
            continue
    return stated


def without(named: Sequence[tuple[str, str]], dropped: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """What is named, less what --no-plugin takes out, also of a preset.

    Raises:
        UnknownPluginError: something that nobody named is to be taken out.
        OwnerError: a part of the core is.
    """
    names = {short(text) for text, _ in named}
    for text, origin in dropped:
        if short(text) in (*BUILT_IN, *DEFAULTS):
            raise OwnerError(f"{text!r} belongs to the core and cannot be disabled", code="core-part-not-removable",
                             who=origin, fix="choose another part in its place, for instance --engine NAME")
        if short(text) not in names:
            raise UnknownPluginError(f"plugin {text!r} is not enabled", code="plugin-not-enabled", who=origin,
                                     got=f"enabled: {', '.join(sorted(names)) or 'none'}",
                                     fix=did_you_mean(short(text), names) or "remove it")
    return [one for one in named if short(one[0]) not in {short(text) for text, _ in dropped}]


def short(text: str) -> str:
    """A plugin's name in any of its spellings: r3, miles-r3, miles-plugin-r3, dist:r3; a file's path stays."""
    if text.endswith(".py") or "/" in text:
        return text
    return text.rpartition(":")[2].removeprefix("miles-plugin-").removeprefix("miles-")


def _find(text: str, origin: str, have: Sequence[Installed]) -> Selected:
    if text.endswith(".py") or "/" in text:
        import hashlib  # loads OpenSSL, which --help does without

        path = Path(text).resolve()
        manifest = manifests.of_source(path)
        return Selected(manifest, "file", hashlib.sha256(path.read_bytes()).hexdigest()[:12], origin)
    distribution, name = text.rpartition(":")[0], short(text)
    matches = [one for one in have if one.name == name and distribution in ("", one.distribution)]
    if len(matches) > 1:
        raise OwnerError(f"plugin {name!r} is in {len(matches)} distributions: "
                         + ", ".join(f"{m.distribution} {m.version}" for m in matches), code="plugin-distributed-twice",
                         who=origin, fix=f"write {matches[0].distribution}:{name}, or uninstall one")
    if not matches:
        raise _unknown(text, name, origin, have)
    one = matches[0]
    if needs := one.unmet():
        from miles_core import __version__

        raise ManifestError(f"plugin {name!r} needs {needs}", code="plugin-version-mismatch",
                            got=f"this is {__version__}", who=f"{one.distribution} {one.version}",
                            fix=f"pip install --upgrade {one.distribution}")
    return Selected(manifest_of(one), one.distribution, one.version, origin)


def manifest_of(one: Installed) -> Manifest:
    """What an installed plugin states; nothing of it is imported.

    Raises:
        ManifestError: the statement is missing or cannot be read.
    """
    return manifests.of_package(one.entry, one.name, editable=one.editable)


def _unknown(text: str, name: str, origin: str, have: Sequence[Installed]) -> UnknownPluginError:
    names = [one.name for one in have]
    fix = "leave spaces between names, not commas" if "," in text else did_you_mean(name, [*KNOWN, *names])
    return UnknownPluginError(f"unknown plugin {text!r}", code="plugin-unknown", who=origin,
                              got=None if fix else f"installed: {', '.join(names) or 'none'}",
                              fix=fix or "pip install it, or pass a file: ./my_plugin.py")
