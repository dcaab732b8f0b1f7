"""Surfaces: options of an installed program that a package hands on, known by reading that program's source.

A trainer's or an engine's package brings one with the hook `option_surface`. Its values are in `RunConfig.surfaces`, by
the names of the plan's tables, such as "megatron".
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from miles_core.config.flags import Assignment, Given


class Surface(Protocol):
    """Options that are not declared here, but are those of a program as it is installed.

    Args:
        tables: tables of a run file whose further keys it may know.
        stored: tables of the plan that hold its values.
    """

    tables: tuple[str, ...]
    stored: tuple[str, ...]

    def from_flag(self, flag: Given, notes: list[str]) -> list[Assignment] | None:
        """What a flag assigns; None where it is none of the program's.

        Raises:
            UnknownKeyError: a flag that has no place here; says what to write.
        """

    def typed(self, assignment: Assignment) -> tuple[str, object] | None:
        """The key in the plan and the typed value; None where the program has no such option.

        Raises:
            ConfigError: the value does not fit.
        """

    def suggest(self, flag: str) -> Iterable[tuple[float, str]]:
        """(likeness from 0 to 1, flag) of flags that were perhaps meant by one that nobody knows."""

    def complete(self, prefix: str) -> Iterable[tuple[str, str]]:
        """(flag, help) of the flags that begin so."""

    def page(self, table: str) -> list[str]:
        """What docs/flags.md says of a table's further keys, in Markdown."""

    def appendix(self) -> list[str]:
        """What docs/flags.md says beside its tables."""


def alike(flag: str, known: Sequence[str], cutoff: float) -> list[tuple[float, str]]:
    """The known flag that one resembles most, with how much; none where none is close."""
    return [(difflib.SequenceMatcher(None, near, flag).ratio(), near)
            for near in difflib.get_close_matches(flag, known, 1, cutoff)]
