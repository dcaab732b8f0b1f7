"""The plugin: its command."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    import click


class Reproduce:
    """Runs a recipe again and says whether the outcome is the one that it claims."""

    @hookimpl("commands", name="reproduce")
    def reproduce(self) -> click.Command:
        """Run a recipe and say whether the outcome is inside its claim."""
        from miles_reproduce.command import command

        return command
