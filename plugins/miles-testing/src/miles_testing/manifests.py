"""The text of miles-plugin.toml, which miles_core/plugins/manifest.py reads."""

from __future__ import annotations

import json

from miles_core.plugins.manifest import LISTS, STATED, WORDS, Manifest


def to_toml(manifest: Manifest) -> str:
    """The text of miles-plugin.toml."""
    def value(item: object) -> str:
        return json.dumps(list(item) if isinstance(item, tuple) else item, ensure_ascii=False)

    def inline(item: object) -> str:
        if not isinstance(item, dict):
            return value(item)
        return "{ " + ", ".join(f"{value(name)} = {inline(one)}" for name, one in item.items()) + " }"

    lines = ["# Generated from the code by `miles plugins manifest --write`; a test compares the two.",
             *(f"{key} = {value(getattr(manifest, key))}" for key in ("name", "plugin", "summary", "api"))]
    lines += [f"hookspecs = {value(manifest.hookspecs)}"] if manifest.hookspecs else []
    lines += ["default = true"] if manifest.default else []
    lines += [f"{key} = {value(words)}" for key in WORDS if (words := getattr(manifest, key))]
    for key in STATED:
        if stated := getattr(manifest, key):
            lines += ["", f"[{key}]", *(f"{value(name)} = {inline(item)}" for name, item in stated.items())]
    for offer in manifest.offers:
        lines += ["", "[[offers]]", *(f"{key} = {value(getattr(offer, key))}" for key in ("hook", "name", "method"))]
        lines += [f"help = {value(offer.help)}"] if offer.help else []
    for option in manifest.options.values():
        lines += ["", f"[options.{option.name}]", f"type = {value(option.type)}"]
        lines += [f"default = {value(option.default)}"] if option.default is not None else []
        lines += [f"help = {value(option.help)}"]
        lines += [f"{key} = {value(getattr(option, key))}" for key in LISTS if getattr(option, key)]
    return "\n".join(lines) + "\n"
