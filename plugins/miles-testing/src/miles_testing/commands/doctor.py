"""`miles plugins doctor`."""

from __future__ import annotations

import click

from miles_core.cli.completion import plugins as complete
from miles_core.errors import PluginError
from miles_core.plugins.scan import installed
from miles_core.plugins.select import select, short
from miles_testing.health import examine


@click.command("doctor")
@click.argument("names", nargs=-1, shell_complete=complete)
def doctor(names: tuple[str, ...]) -> None:
    """Import each installed plugin, or those named, in a process of its own: time, memory, what comes along.

    \b
      miles plugins doctor
      miles plugins doctor r3 fp8

    The exit status is 1 where one cannot be loaded.
    """
    wanted = {short(name) for name in names}
    have = [one for one in installed() if not wanted or one.name in wanted]
    if missing := wanted - {one.name for one in have}:
        select([(min(missing), "miles plugins doctor")], ())  # says what is wrong with the name
    broken = 0
    click.echo(f"{'plugin':<18}{'CPU s':>7}{'MiB':>7}  comes along")
    for health in examine(have):
        one = health.plugin
        if health.error is not None:
            broken += 1
            click.echo(f"{one.name:<18}{'broken':>7}         {one.distribution} {one.version}: {health.error}")
            continue
        along = ", ".join(health.heavy) or "nothing heavy"
        click.echo(f"{one.name:<18}{health.seconds:>7.2f}{health.mib:>7.0f}  {along}{', a CUDA context' * health.cuda}")
    if broken:
        raise PluginError(f"{broken} of {len(have)} plugins cannot be loaded", code="plugins-cannot-load",
                          fix="reinstall or uninstall them; runs that do not name them are not concerned")
