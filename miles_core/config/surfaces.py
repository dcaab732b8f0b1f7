"""Surfaces: flags and keys without a declared option, which a package knows all the same.

A trainer's or an engine's package brings the options of the program that is installed, with the hook `option_surface`;
their values are in `RunConfig.surfaces`, by the names of the plan's tables, such as "megatron". A list of another
program's flags, which become options of the run or are refused with what to write, is one as well.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from miles_core.config.tables import RunConfig

if TYPE_CHECKING:
    from miles_core.config.flags import Assignment, Given
    from miles_core.config.options import Option
    from miles_core.plugins.select import Selected


class Surface(Protocol):
    """Options that are not declared here, but are those of a program as it is installed. A class that derives from this
    one writes what it has.

    Args:
        tables: tables of a run file whose further keys it may know.
        stored: tables of the plan that hold its values.
    """

    tables: tuple[str, ...] = ()
    stored: tuple[str, ...] = ()

    def plugin(self, flag: str) -> str | None:
        """The official plugin that a flag names as clearly as --plugin does."""
        return None

    def from_flag(self, flag: Given, notes: list[str]) -> list[Assignment] | None:
        """What a flag assigns; None where it is none of the program's.

        Raises:
            UnknownKeyError: a flag that has no place here; says what to write.
        """
        return None

    def typed(self, assignment: Assignment) -> tuple[str, object] | None:
        """The key in the plan and the typed value; None where the program has no such option.

        Raises:
            ConfigError: the value does not fit.
        """
        return None

    def advice(self, name: str) -> str | None:
        """What to write in place of an unknown name: of a flag without its dashes, which is also a key, or
        of "HOOK:NAME", a part."""
        return None

    def suggest(self, flag: str) -> Iterable[tuple[float, str]]:
        """(likeness from 0 to 1, flag) of flags that an unknown one may have meant."""
        return ()

    def complete(self, prefix: str) -> Iterable[tuple[str, str]]:
        """(flag, help) of the flags that begin so."""
        return ()

    def page(self, table: str) -> Iterable[str | Option]:
        """What docs/flags.md says of a table's further keys: lines of Markdown, and the keys."""
        return ()

    def appendix(self) -> Iterable[str | tuple[str, str, str]]:
        """What docs/flags.md says beside its tables: lines of Markdown, and (flag, what becomes of it, meaning)."""
        return ()


def surfaces_of(selected: Sequence[Selected]) -> list[Surface]:
    """The surfaces that these plugins bring."""
    from miles_core.plugins.bind import bind

    bringing = [one for one in selected if any(offer.hook == "option_surface" for offer in one.manifest.offers)]
    key = tuple(one.manifest.plugin for one in bringing)
    if key not in _SURFACES:  # a configuration is built three times
        option_surface = bind(bringing, RunConfig(), "plan").option_surface
        _SURFACES[key] = option_surface() if option_surface is not None else []
    return _SURFACES[key]


_SURFACES: dict[tuple[str, ...], list[Surface]] = {}
"""Plugins -> what they brought."""


def advice(surfaces: Iterable[Surface], name: str) -> str | None:
    """The advice of the first surface that knows an unknown flag, key or part."""
    return next((text for surface in surfaces if (text := surface.advice(name))), None)


def alike(flag: str, known: Sequence[str], cutoff: float) -> list[tuple[float, str]]:
    """The known flag that one resembles most, with how much; none where none is close."""
    same = [one for one in known if "no-" in one or "--no-" not in flag]  # not what turns on for what turns off
    near = difflib.get_close_matches(flag, same, 1, cutoff)
    return [(difflib.SequenceMatcher(None, one, flag).ratio(), one) for one in near]
