"""Flags: a command line becomes assignments of values to keys.

Every key is a flag; options may declare further spellings, and a spelling has one owner. The surfaces of the enabled
plugins handle unknown flags (surfaces.py): they accept one, note that it is derived, or name its replacement.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from miles_core.config.options import Option, Origin
from miles_core.config.surfaces import Surface, advice, alike
from miles_core.config.tables import TABLES
from miles_core.errors import ConfigError, OwnerError, UnknownKeyError

NAMING = {"--plugin": "Enable a plugin, by name or file; may be repeated.",
          "--no-plugin": "Take a plugin out again, also one of a preset.",
          "--preset": "Plugins and values under a name that a plugin offers."}
"""Flags that say of what a run is made, and are no option's, with their help."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """One value for one key, e.g. "rollout.num_rollout" or "megatron.num_moe_experts".

    Args:
        yields: to a flag that names the key itself, wherever that stands.
    """

    key: str
    value: object
    origin: Origin
    yields: bool = False


@dataclass(frozen=True, slots=True)
class Given:
    """A flag as it stands on the command line, with the words that follow it."""

    flag: str
    words: tuple[str, ...]


Spellings = dict[str, tuple[Option, bool]]
"""Flag -> the option that it belongs to, and whether it switches it off."""


def spellings(option: Option) -> tuple[list[str], list[str]]:
    """(flags that set an option, flags that switch it off), its own name first."""
    dashed = option.name.replace("_", "-")
    prefix = "" if option.table in TABLES else f"{option.table}."
    off = [f"--{prefix}no-{dashed}", *option.off] if option.is_bool else []
    return [f"--{prefix}{dashed}", *option.flags], off


def owners(options: Iterable[Option]) -> Spellings:
    """Whose each flag is.

    Raises:
        OwnerError: two options claim one spelling.
    """
    claimed: Spellings = {}
    for option in options:
        on, off = spellings(option)
        for flag in (*on, *off):
            first = claimed.setdefault(flag, (option, flag in off))[0]
            if first.key != option.key:
                raise OwnerError(f"the flag {flag} is claimed by {first.key} and by {option.key}",
                                 code="flag-owned-twice", fix="rename the spelling in one of the two plugins")
    return claimed


def split(argv: Sequence[str]) -> list[Given]:
    """Group words by the flag they follow. `--key=value` and `--key value` are the same; `_` and `-` too.

    Raises:
        ConfigError: a word before the first flag.
    """
    groups: list[tuple[str, list[str]]] = []
    for word in argv:
        if word.endswith("\r") or groups and groups[-1][1] and word and not word.strip(" \t"):
            raise ConfigError("a line continuation of the command is broken", code="flag-broken-line", got=repr(word),
                              who=groups[-1][0] if groups else None,
                              fix="use Unix line ends (sed -i 's/\\r$//' SCRIPT) and leave nothing after a backslash")
        if word.startswith("--") and len(word) > 2:
            flag, equals, value = word.partition("=")
            groups.append((flag.replace("_", "-"), [value] if equals else []))
        elif not groups:
            raise ConfigError("unexpected word before the first flag", code="word-before-flags", got=word,
                              fix="write miles run [RUN FILE] --flag value ...")
        else:
            groups[-1][1].append(word)
    return [Given(flag, tuple(words)) for flag, words in groups]


def assign(cli_flags: Sequence[Given], spellings: Spellings, plugins: Mapping[str, str],
           surfaces: Sequence[Surface]) -> tuple[list[Assignment], list[str]]:
    """The assignments that the flags make, and notes about flags that are not needed.

    Args:
        plugins: plugins that are known but not enabled -> how to enable them, for messages.
        surfaces: of the enabled plugins; they handle undeclared flags, in order.

    Raises:
        UnknownKeyError: the flag is unknown or unsupported; names what to write instead.
        ConfigError: too many or too few words after it.
    """
    made: list[Assignment] = []
    notes: list[str] = []
    for one in cli_flags:
        for word in one.words:
            meant = re.sub("^[-\u2013\u2014]+(?=[a-z])", "--", word).partition("=")[0].replace("_", "-")
            if meant.startswith("--") and (meant in spellings or any(
                    near == (1.0, meant) for surface in surfaces for near in surface.suggest(meant))):
                raise ConfigError("a flag starts with two dashes", code="flag-single-dash", got=word, who=one.flag,
                                  fix=f"write {meant}")
        if one.flag in spellings:
            option, off = spellings[one.flag]
            made.append(Assignment(option.key, value_of(one, option, off), Origin("flag", one.flag)))
        else:
            foreign = _foreign(one, spellings, plugins, surfaces, notes)
            made = [*foreign, *made] if any(each.yields for each in foreign) else [*made, *foreign]
    return made, notes


def value_of(one: Given, option: Option, off: bool) -> object:
    """The words after a flag as the value of its option, not yet typed.

    Raises:
        ConfigError: too many or too few.
    """
    if option.is_bool:
        if len(one.words) > 1:
            raise ConfigError(f"{one.flag} takes no value", code="flag-takes-no-value", got=" ".join(one.words),
                              fix="write the flag alone")
        truth = one.words[0].lower() if one.words else "true"
        if truth not in ("true", "false", "1", "0", "yes", "no"):
            raise ConfigError(f"{one.flag} takes true, false or no value", code="flag-takes-true-or-false", got=truth,
                              fix="write the flag alone")
        return (truth in ("true", "1", "yes")) != off
    if option.is_list:
        return list(one.words)
    if len(one.words) != 1:
        raise ConfigError(f"{one.flag} takes exactly one value", got=" ".join(one.words) or "none",
                          code="flag-takes-one-value", fix=f"write {one.flag} VALUE; a flag starts with two dashes")
    return one.words[0]


def _foreign(one: Given, spellings: Spellings, plugins: Mapping[str, str], surfaces: Sequence[Surface],
             notes: list[str]) -> list[Assignment]:
    """A flag that is no option of the core or an enabled plugin."""
    try:
        for surface in surfaces:
            if (made := surface.from_flag(one, notes)) is not None:
                return made
        raise _unknown(one.flag, spellings, surfaces)
    except UnknownKeyError as error:
        raise _not_enabled(one.flag, plugins, surfaces) or error from None


def needless(one: Given, switch: bool, why: str, notes: list[str]) -> list[Assignment]:
    """What a flag assigns that changes nothing here: nothing, with a note that says why."""
    if switch:
        alone(one)
    notes.append(f"{one.flag} changes nothing: {why}")
    return []


def alone(one: Given) -> None:
    """See that a flag stands alone.

    Raises:
        ConfigError: a word after a flag that says all by itself, other than a yes.
    """
    if one.words and [word.lower() for word in one.words] not in (["true"], ["1"], ["yes"]):
        raise ConfigError(f"{one.flag} takes no value", code="flag-takes-no-value", got=" ".join(one.words),
                          fix="write the flag alone, or leave it out")


def words_of(one: Given) -> object:
    """The words after a flag as a run file would hold them: True, a text, or a list."""
    if not one.words:
        return True
    return one.words[0] if len(one.words) == 1 else list(one.words)


def _not_enabled(flag: str, plugins: Mapping[str, str], surfaces: Sequence[Surface]) -> UnknownKeyError | None:
    """The error for a flag of a plugin that is not enabled: --PLUGIN.OPTION, a flag of an option, or else its name."""
    from miles_core.plugins.select import readable

    claiming = (one.name for one in readable() if one.name in plugins for o in one.options.values()
                if flag in o.flags + o.off or o.name == flag[2:].replace("-", "_") and not advice(surfaces, flag[2:]))
    name = flag[2:].partition(".")[0]
    owner = name if name in plugins else next(claiming, None)
    return None if owner is None else UnknownKeyError(
        f"{flag} belongs to plugin {owner!r}, which is not enabled", code="flag-of-disabled-plugin", fix=plugins[owner])


def _unknown(flag: str, spellings: Spellings, surfaces: Sequence[Surface]) -> UnknownKeyError:
    near = [*alike(flag, [*spellings, *NAMING], 0.7), *(one for each in surfaces for one in each.suggest(flag))]
    remedy = advice(surfaces, flag[2:].rpartition(".")[2])  # verl's are a.b.c
    return UnknownKeyError(f"unknown flag {flag}", code="flag-unknown", fix=remedy or (
                           f"did you mean {max(near)[1]}?" if near else "see miles run --help"))
