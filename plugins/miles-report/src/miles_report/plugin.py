"""The plugin: its commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    import click


class Report:
    """A page about a run, a live view, a doctor, and the first difference between two runs."""

    default = True

    @hookimpl("commands", name="report")
    def report(self) -> click.Command:
        """Write one HTML page about a run."""
        from miles_report.commands.report import command

        return command

    @hookimpl("commands", name="watch")
    def watch(self) -> click.Command:
        """Watch a running run in the browser."""
        from miles_report.commands.watch import command

        return command

    @hookimpl("commands", name="doctor")
    def doctor(self) -> click.Command:
        """Diagnose a run: what is wrong, and on which side."""
        from miles_report.commands.doctor import command

        return command

    @hookimpl("commands", name="diff")
    def diff(self) -> click.Command:
        """Name the first difference between two runs."""
        from miles_report.commands.diff import command

        return command
