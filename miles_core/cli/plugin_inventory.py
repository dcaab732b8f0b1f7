"""`miles plugins list | info | doctor | install`."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import asdict

import click

from miles_core.cli.completion import plugins as complete
from miles_core.errors import MilesError, PluginError
from miles_core.plugins.manifest import STATED, WORDS, Manifest
from miles_core.plugins.scan import BUILT_IN, KNOWN, installed
from miles_core.plugins.select import Selected, built_in, manifest_of, select, short


@click.command("list")
@click.option("--all", "everything", is_flag=True, help="The core's own parts and what each plugin offers, too.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def list_(everything: bool, as_json: bool) -> None:
    """Plugins of this environment. Installed never means active: a run names what it uses.

    \b
      miles plugins list
      miles plugins list --all
      miles plugins list --json
    """
    rows = _rows(everything)
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    for row in rows:
        state = f"{row['distribution']} {row['version']}" if row["installed"] else f"not installed: {row['install']}"
        click.echo(f"{row['name']:<18}{state}" + (f"  cannot be read: {row['error']}" if row.get("error") else ""))
        if everything and row.get("summary"):
            click.echo(f"{'':<18}{row['summary']}")
            click.echo(f"{'':<18}{', '.join(row['offers'])}")


def _rows(everything: bool) -> list[dict]:
    rows = [_row(one.manifest.name, one.source, one.version, one) for one in built_in()] if everything else []
    have = installed()
    for one in have:
        try:
            selected = Selected(manifest_of(one), one.distribution, one.version, "")
        except MilesError as error:
            rows.append({"name": one.name, "distribution": one.distribution, "version": one.version, "installed": True,
                         "offers": [], "error": str(error)})
            continue
        rows.append(_row(one.name, one.distribution, one.version, selected))
    names = {one.name for one in have}
    return rows + [{"name": name, "installed": False, "install": f"pip install miles-{name}", "offers": list(offers)}
                   for name, offers in sorted(KNOWN.items()) if name not in names]


def _row(name: str, distribution: str, version: str, one: Selected) -> dict:
    offers = [f"{offer.hook}:{offer.name}" for offer in one.manifest.offers]
    return {"name": name, "distribution": distribution, "version": version, "installed": True, "api": one.manifest.api,
            "summary": one.manifest.summary, "offers": offers}


@click.command("info")
@click.argument("plugin", shell_complete=complete)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def info(plugin: str, as_json: bool) -> None:
    """Everything that PLUGIN states about itself: a name, a distribution:name or a file.

    \b
      miles plugins info r3
      miles plugins info ./my_plugin.py
    """
    if short(plugin) in BUILT_IN:
        (one,) = (each for each in built_in() if each.manifest.name == short(plugin))
    else:
        (one,) = select([(plugin, "miles plugins info")], ())
    if as_json:
        click.echo(json.dumps({"source": one.source, "version": one.version, **asdict(one.manifest)}, indent=1))
        return
    manifest = one.manifest
    click.echo(f"{manifest.name}  {one.source} {one.version}, plugin API {manifest.api}\n{manifest.summary}\n")
    _offers(manifest)
    if manifest.options:
        click.echo("options")
    for option in manifest.options.values():
        flags = ", ".join([f"--{manifest.name}.{option.name}", *option.flags])
        click.echo(f"  {flags}  [{option.type}, default {option.default!r}]\n      {option.help}")
    for title in WORDS:
        if words := getattr(manifest, title):
            click.echo(f"{title}: {', '.join(words)}")
    for title in STATED:
        if stated := getattr(manifest, title):
            click.echo("\n".join([title, *(f"  {name}: {value}" for name, value in stated.items())]))


def _offers(manifest: Manifest) -> None:
    from miles_core.hookspecs import specs

    table = specs()
    click.echo("hooks")
    for offer in manifest.offers:
        spec = table.get(offer.hook)
        kind = f"{spec.kind}, {spec.role} role, once a {spec.per}" if spec else "no hook of this version"
        named = f" {offer.name!r}" if spec and spec.kind == "named" else ""
        click.echo(f"  {offer.hook}{named}  ({kind})")


@click.command("doctor")
@click.argument("names", nargs=-1, shell_complete=complete)
def doctor(names: tuple[str, ...]) -> None:
    """Import each installed plugin, or those named, in a process of its own: time, memory, what comes along.

    \b
      miles plugins doctor
      miles plugins doctor r3 fp8

    The exit status is 1 where one cannot be loaded.
    """
    from miles_core.plugins.health import examine

    wanted = {short(name) for name in names}
    have = [one for one in installed() if not wanted or one.name in wanted]
    if missing := wanted - {one.name for one in have}:
        select([(min(missing), "miles plugins doctor")], ())  # says what is wrong with the name
    broken = 0
    click.echo(f"{'plugin':<18}{'CPU s':>7}{'MiB':>7}  comes along")
    for found in examine(have):
        one = found.plugin
        if found.error is not None:
            broken += 1
            click.echo(f"{one.name:<18}{'broken':>7}         {one.distribution} {one.version}: {found.error}")
            continue
        along = ", ".join(found.heavy) or "nothing heavy"
        click.echo(f"{one.name:<18}{found.seconds:>7.2f}{found.mib:>7.0f}  {along}{', a CUDA context' * found.cuda}")
    if broken:
        raise PluginError(f"{broken} of {len(have)} plugins cannot be loaded",
                          fix="reinstall or uninstall them; runs that do not name them are not concerned")


@click.command("install")
@click.argument("names", nargs=-1, required=True)
@click.option("--dry-run", is_flag=True, help="Print the command and stop.")
def install(names: tuple[str, ...], dry_run: bool) -> None:
    """Install plugins into the Python that runs this, with pip: r3 stands for miles-r3.

    \b
      miles plugins install r3 fp8
      miles plugins install ./my-plugin
    """
    words = [name if "/" in name or name.startswith("miles-") else f"miles-{name}" for name in names]
    command = [sys.executable, "-m", "pip", "install", *words]
    click.echo(shlex.join(command))
    if not dry_run and (status := subprocess.run(command, check=False).returncode):
        raise PluginError("pip did not install them", got=f"exit status {status}",
                          fix="see above; a third party's distribution goes by its full name")
