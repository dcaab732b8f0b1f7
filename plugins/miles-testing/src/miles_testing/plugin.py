"""The plugin: the commands of those who write plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    import click


class Testing:
    """Conformance kits for plugins and parts, the template of a plugin's project, and pages of hooks and flags."""

    default = True

    @hookimpl("commands", name="plugins new")
    def new(self) -> click.Command:
        """Create a plugin project."""
        from miles_testing.commands.authoring import new

        return new

    @hookimpl("commands", name="plugins update-template")
    def update_template(self) -> click.Command:
        """Bring a project up to date with its template."""
        from miles_testing.commands.authoring import update_template

        return update_template

    @hookimpl("commands", name="plugins manifest")
    def manifest(self) -> click.Command:
        """Write or check miles-plugin.toml."""
        from miles_testing.commands.authoring import manifest

        return manifest

    @hookimpl("commands", name="plugins doctor")
    def doctor(self) -> click.Command:
        """Import each plugin in a separate process."""
        from miles_testing.commands.doctor import doctor

        return doctor

    @hookimpl("commands", name="flags")
    def flags(self) -> click.Command:
        """Every flag, as Markdown."""
        from miles_testing.commands.flags import command

        return command

    @hookimpl("commands", name="hooks")
    def hooks(self) -> click.Command:
        """Every hook that a plugin may implement, as Markdown."""
        from miles_testing.commands.hooks import command

        return command
