"""The plugin: it brings the list."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from miles_core.config import RunConfig
    from miles_core.config.surfaces import Surface


class Flags:
    """Takes the flags of Miles's and slime's launch scripts, or says what to write instead."""

    default = True

    @hookimpl
    def option_surface(self) -> Iterable[Surface]:
        """The flags that have no option of that name here, and names of parts."""
        from miles_flags.table import MilesFlags

        return [MilesFlags()]

    @hookimpl
    def derive(self, config: RunConfig, note: Callable[[str], None]) -> RunConfig:
        """What a function that is named by path, and what nothing is said of, stands for in a launch script."""
        from miles_flags.defaults import of_trainer
        from miles_flags.functions import parts_of

        return parts_of(of_trainer(config), note)
