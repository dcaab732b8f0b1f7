"""`miles plugins list | info | install | uninstall`."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict

import click

from miles_core.cli.completion import plugins as complete
from miles_core.errors import MilesError, PluginError, UnknownPluginError
from miles_core.plugins.manifest import STATED, WORDS, Manifest, folder_of
from miles_core.plugins.scan import BUILT_IN, KNOWN, installed
from miles_core.plugins.select import Selected, built_in, manifest_of, select, short

WIDTH = shutil.get_terminal_size((100, 24)).columns  # of a line of the list


@click.command("list")
@click.option("--hook", metavar="HOOK", help="Only plugins that implement it: reward, advantage, metrics...")
@click.option("--all", "everything", is_flag=True, help="The core's own parts and what each plugin offers, too.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def list_(hook: str | None, everything: bool, as_json: bool) -> None:
    """Plugins of this environment. Installed never means active: a run names what it uses.

    \b
      miles plugins list
      miles plugins list --hook reward
      miles plugins list --all
      miles plugins list --json
    """
    rows = _rows(everything)
    if hook is not None:
        from miles_core.plugins.fit import check_hook

        check_hook(hook)
        rows = [row | {"offers": offers} for row in rows
                if (offers := [offer for offer in row["offers"] if offer.partition(":")[0] == hook])]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    for kind in ("core", "official", "third party", "not installed"):
        if of_kind := [row for row in rows if row["kind"] == kind]:
            click.echo(f"{kind}, miles plugins install NAME gets them" if kind == "not installed" else kind)
        for row in of_kind:
            _print(row, everything or hook is not None)


def _print(row: dict, offers: bool) -> None:
    """One line, and others for what is wrong with the plugin and what it offers."""
    if not row["installed"]:
        click.echo(_cut(f"{row['name']:<18}{', '.join(row['offers'])}"))
        return
    source = f"{row['distribution']} {row['version']}" if row["kind"] == "third party" else row["version"]
    click.echo(_cut(f"{row['name']:<18}{source:<6}  {row.get('summary', '')}"))
    texts = [f"cannot be {'used' if row['offers'] else 'read'}: {row['error']}"] if row.get("error") else []
    texts += [", ".join(row["offers"])] if offers else []
    for text in filter(None, texts):
        click.echo(textwrap.fill(text, WIDTH, initial_indent=" " * 18, subsequent_indent=" " * 18,
                                 break_on_hyphens=False, break_long_words=False))


def _cut(line: str) -> str:
    line = line.rstrip()
    return line if len(line) <= WIDTH else line[: WIDTH - 3].rpartition(" ")[0] + " ..."


def _rows(everything: bool) -> list[dict]:
    core = [one for one in built_in() if everything and one.source == "built-in"]
    rows = [_row(one.manifest, one.source, one.version) | {"kind": "core"} for one in core]
    have = installed()
    for one in have:
        kind = {"kind": "official" if one.official else "third party"}
        try:
            row = _row(manifest_of(one), one.distribution, one.version)
            needs = {"error": f"needs {unmet}"} if (unmet := one.unmet()) else {}
            rows.append(row | kind | needs)
        except MilesError as error:
            rows.append({"name": one.name, "distribution": one.distribution, "version": one.version, "installed": True,
                         "offers": [], "error": str(error), **kind})
    names = {one.name for one in have}
    return rows + [{"name": name, "installed": False, "kind": "not installed", "install": f"pip install miles-{name}",
                    "offers": list(offers)} for name, offers in sorted(KNOWN.items()) if name not in names]


def _row(manifest: Manifest, distribution: str, version: str) -> dict:
    offers = [f"{offer.hook}:{offer.name}" for offer in manifest.offers]
    return {"name": manifest.name, "distribution": distribution, "version": version, "installed": True,
            "api": manifest.api, "summary": manifest.summary, "offers": offers}


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
    for title, text in _about(plugin, one):
        click.echo(f"{title:<10}{text}")
    click.echo()
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


def _about(word: str, one: Selected) -> Iterator[tuple[str, str]]:
    """How a plugin is enabled, who wrote it, where it lives."""
    name = word if one.source == "file" else one.manifest.name
    if one.source == "built-in":
        yield "enabled", "always; imported where a run picks a part of it"
    else:
        yield "enable", f'--plugin {name}, or plugins = ["{name}"] in the run file'
    if one.source in ("built-in", "file"):
        yield "lives in", one.manifest.plugin.rpartition(":")[0]
        return
    about = importlib.metadata.metadata(one.source)
    authors = [about[key] for key in ("Author", "Author-email", "Maintainer-email") if about[key]]
    yield "author", authors[0] if authors else "not stated"
    yield from (("home", url.partition(", ")[2]) for url in (about.get_all("Project-URL") or ())[:1])
    yield "lives in", str(folder_of(one.manifest.plugin) or "?")


def _offers(manifest: Manifest) -> None:
    from miles_core.plugins.select import all_specs

    table = all_specs()
    click.echo("hooks")
    for offer in manifest.offers:
        spec = table.get(offer.hook)
        kind = f"{spec.kind}, {spec.role} role, once a {spec.per}" if spec else "no hook of this version"
        named = f" {offer.name!r}" if spec and spec.kind == "named" else ""
        click.echo(f"  {offer.hook}{named}  ({kind})")


@click.command("install")
@click.argument("names", nargs=-1, required=True)
@click.option("--dry-run", is_flag=True, help="Print the command and stop.")
def install(names: tuple[str, ...], dry_run: bool) -> None:
    """Install plugins into the Python that runs this, with pip: r3 stands for miles-r3, else miles-plugin-r3.

    \b
      miles plugins install r3 fp8
      miles plugins install ./my-plugin
    """
    status = 0
    for prefix in ("miles-", "miles-plugin-"):
        bare = [name for name in names if not ("/" in name or name.startswith("miles-") or name in KNOWN)]
        words = [f"{prefix}{name}" if name in bare else f"miles-{name}" if name in KNOWN else name for name in names]
        status = _pip("install", words, dry_run)
        if not status or not bare:
            break
    if status:
        raise PluginError("pip install failed", code="pip-install-failed", got=f"exit status {status}",
                          fix="see pip's output above; give a distribution of another name in full")


@click.command("uninstall")
@click.argument("names", nargs=-1, required=True, shell_complete=complete)
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Print the command and stop.")
def uninstall(names: tuple[str, ...], yes: bool, dry_run: bool) -> None:
    """Remove plugins from the Python that runs this, with pip, by any of their names.

    \b
      miles plugins uninstall r3
    """
    have = {one.name: one.distribution for one in installed()}
    if unknown := next((name for name in names if short(name) not in have), None):
        raise UnknownPluginError(f"plugin {unknown!r} is not installed", got=f"installed: {', '.join(have) or 'none'}",
                                 code="plugin-not-installed", fix="run `miles plugins list` to see what is installed")
    if status := _pip("uninstall", ["-y"] * yes + [have[short(name)] for name in names], dry_run):
        raise PluginError("pip uninstall failed", code="pip-uninstall-failed", got=f"exit status {status}",
                          fix="see pip's output above")


def _pip(verb: str, words: list[str], dry_run: bool) -> int:
    command = [sys.executable, "-m", "pip", verb, *words]
    click.echo(shlex.join(command))
    return 0 if dry_run else subprocess.run(command, check=False).returncode
