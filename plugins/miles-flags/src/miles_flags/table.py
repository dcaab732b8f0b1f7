"""The list of Miles's and slime's flags (flags.toml) as a surface (miles_core/config/surfaces.py).

Only what no option spells is looked up in it, and only then is it read. It also knows the names of parts that have
another name here, and what flags of other trainers are called.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tomllib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.config.flags import Assignment, alone, needless, words_of
from miles_core.config.options import Origin, options_of
from miles_core.config.surfaces import Surface, alike
from miles_core.config.tables import TABLES
from miles_core.errors import ConfigError, UnknownKeyError

if TYPE_CHECKING:
    from miles_core.config.flags import Given

PAGE = """\
What becomes of every flag of the Miles and slime of mid-2026, so that a launch script carries over. Flags that they
take over from Megatron-LM are in the list of those.
"""


@functools.cache
def table() -> Mapping[str, Any]:
    """flags.toml whole: `flags`, `prefixes` of flags, sentences of `families`, names of `parts`, or patterns of them,
    that have another name here, and what `others` have flags for."""
    with Path(__file__).with_name("flags.toml").open("rb") as file:
        return tomllib.load(file)


def flags() -> Mapping[str, Mapping[str, Any]]:
    """Every flag of Miles and slime and what becomes of it."""
    flags: Mapping[str, Mapping[str, Any]] = table()["flags"]
    return flags


def refusal(flag: str) -> str | None:
    """What is said of a flag that has no place here; None where it has one, or is not in the list."""
    begun = (reason for prefix, reason in table()["prefixes"].items() if flag.startswith(prefix))
    reason = flags()[flag].get("refused") if flag in flags() else next(begun, None)
    return None if reason is None else _sentence(reason)


class MilesFlags(Surface):
    """The list as the options of a program that is not installed: nothing is stored under its name."""

    def plugin(self, flag: str) -> str | None:
        """See Surface."""
        name: str | None = flags().get(flag, {}).get("plugin")
        return name

    def from_flag(self, flag: Given, notes: list[str]) -> list[Assignment] | None:
        """See Surface."""
        entry = flags().get(flag.flag)
        if entry is not None and "values" in entry:
            text = " ".join(flag.words)
            entry = next((taken for like, taken in entry["values"].items() if fnmatchcase(text, like)), entry)
        if (reason := refusal(flag.flag)) is not None and (entry is None or "refused" in entry):
            raise UnknownKeyError(f"{flag.flag} has no place here", code="miles-flag-unsupported", who="Miles's flag",
                                  fix=reason)
        if entry is None:
            return None
        if "environment" in entry:
            return _keep_secret(entry["environment"], flag)
        if "derived" in entry:
            return needless(flag, bool(entry.get("switch")), _sentence(entry["derived"]), notes)
        if "plugin" in entry and "set" not in entry:  # it is enabled, all that a flag asks which no option of it spells
            return []
        origin = Origin("flag", flag.flag)
        if "read" in entry:
            return _read(entry["read"], flag, notes, origin)
        if "value" in entry or ("set" in entry and "values" not in flags()[flag.flag]):
            alone(flag)
        if "set" in entry:
            return [Assignment(key, value, origin, yields=True) for key, value in entry["set"].items()]
        words = str(Path(*flag.words, entry["below"])) if "below" in entry else words_of(flag)
        return [Assignment(entry["key"], entry.get("value", words), origin)]

    def advice(self, name: str) -> str | None:
        """See Surface."""
        part: str | None = next((text for like, text in table()["parts"].items() if fnmatchcase(name, like)), None)
        theirs = table()["others"].get(name)
        return part or refusal(f"--{name}") or (f"write {theirs}" if theirs else None)

    def suggest(self, flag: str) -> Iterable[tuple[float, str]]:
        """See Surface."""
        place, _, key = flag[2:].partition(".")
        if place in TABLES and key.replace("-", "_") in options_of(place, TABLES[place]):  # as a plan names it
            return [(1.0, f"--{key}")]
        accepted = [name for name, entry in flags().items() if "refused" not in entry]
        others = {f"--{name}": ours for name, ours in table()["others"].items() if ours.startswith("--")}
        near = alike(flag, accepted, 0.7) or alike(flag, [*flags()], 0.85)
        return [*near, *((likeness, others[name]) for likeness, name in alike(flag, [*others], 0.85))]

    def appendix(self) -> Iterable[str | tuple[str, str, str]]:
        """See Surface."""
        yield from ("## Flags of today's Miles and slime", "", PAGE)
        for flag, entry in flags().items():
            yield flag, next((word for word in ("refused", "derived") if word in entry), "accepted"), _meaning(entry)


def _read(key: str, flag: Given, notes: list[str], origin: Origin) -> list[Assignment]:
    """What a YAML file says of an option, and of those that belong to it."""
    if key == "eval.datasets":
        from miles_flags.eval_config import datasets_of

        return [Assignment(key, datasets_of(flag), origin)]
    from miles_flags.server_groups import sizes_of

    return [Assignment(key, size, origin, yields=True) for key, size in sizes_of(flag, notes).items()]


def _keep_secret(variable: str, flag: Given) -> list[Assignment]:
    """A key becomes a variable of the environment, and is taken out of the command, which trackers record.

    Raises:
        ConfigError: not one word follows the flag.
    """
    if len(flag.words) != 1:
        raise ConfigError(f"{flag.flag} takes exactly one value", got=f"{len(flag.words)} words", who="Miles's flag",
                          fix=f"set {variable} in its place", code="flag-takes-one-value")
    [key] = flag.words
    os.environ[variable] = key
    sys.argv[:] = [word.replace(key, "***") if key else word for word in sys.argv]
    return []


def _sentence(text: str) -> str:
    """A text, or that of its family."""
    return table()["families"][text[1:]] if text.startswith("@") else text


def _meaning(entry: Mapping[str, Any]) -> str:
    for word in ("refused", "derived"):
        if word in entry:
            taken = [f"`{words}`: {_meaning(one)}" for words, one in entry.get("values", {}).items()]
            return _sentence(entry[word]) + (f" Taken are {'; '.join(taken)}" if taken else "")
    if "environment" in entry:
        return f"becomes `{entry['environment']}` in the environment; neither plan nor run directory has it"
    if "read" in entry:
        return f"sets `{entry['read']}` to what the YAML file says"
    if "plugin" in entry:
        return f"belongs to plugin `{entry['plugin']}`" + (f": `{entry['key']}`" if "key" in entry else "")
    if "set" in entry:
        return "sets " + ", ".join(f"`{key} = {json.dumps(value)}`" for key, value in entry["set"].items())
    fixed = f" = {json.dumps(entry['value'])}" if "value" in entry else ""
    return f"sets `{entry['key']}{fixed}`" + (f" to `{entry['below']}` in that folder" if "below" in entry else "")
