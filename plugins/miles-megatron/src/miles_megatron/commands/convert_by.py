"""`miles convert NAME` for the names that plugins offer: hook `convert`, with the plugin's options as flags."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from miles_core.errors import CheckpointError, MilesError
from miles_core.plugins import select
from miles_core.plugins.scan import KNOWN

if TYPE_CHECKING:
    from miles_core.plugins.select import Selected

HOOK = "convert"


def offered() -> dict[str, str]:
    """Name -> plugin, of official plugins and of those that are installed and can be read."""
    official = {offer.partition(":")[2]: plugin for plugin, offers in KNOWN.items() for offer in offers
             if offer.startswith(f"{HOOK}:")}
    return official | {offer.name: manifest.name for manifest in select.readable() for offer in manifest.offers
                    if offer.hook == HOOK}


def taken(out: Path) -> CheckpointError:
    """The error for a target that already exists."""
    return CheckpointError("the target already exists", code="convert-target-exists", who=str(out),
                           fix="give a folder that does not exist yet")


def check_free(out: Path) -> None:
    """
    Raises:
        CheckpointError: the target exists and is not an empty folder.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise taken(out)


class Conversions(click.Group):
    """A group with the core's own conversions and those of plugins."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*super().list_commands(ctx), *sorted(offered())]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        own = super().get_command(ctx, name)
        if own is not None or (plugin := offered().get(name)) is None:
            return own
        return _command(name, plugin)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As a click group does, but each with its whole first line."""
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        with formatter.section("Commands"):
            formatter.write_dl([(name, (one.help or "").partition("\n")[0]) for name, one in commands.items() if one])


def _command(name: str, plugin: str) -> click.Command:
    one = refusal = None
    try:
        (one,) = select.select([(plugin, f"miles convert {name}")], ())
        own = next((offer.help for offer in one.manifest.offers if (offer.hook, offer.name) == (HOOK, name)), "")
        options, about = one.manifest.options.values(), f"{own or one.manifest.summary} (plugin {plugin})"
    except MilesError as error:  # not installed: said when it is called, and in the help
        refusal, options, about = error, (), str(error)

    def run(source: Path, out: Path, **values: object) -> None:
        if refusal is not None:
            raise refusal
        click.echo(f"Wrote {out}: {_convert(one, name, source, out, values)}")

    parameters = [click.Argument(["source"], metavar="SRC", type=click.Path(exists=True, file_okay=False,
                                                                            path_type=Path)),
                  click.Argument(["out"], type=click.Path(path_type=Path))]
    for option in options:
        words = [f"--{option.name.replace('_', '-')}"]
        words[0] += f"/--no-{words[0][2:]}" if option.is_bool else ""
        own_help = option.help + " May be repeated." * option.is_list
        parameters.append(click.Option([option.name, *words], help=own_help, multiple=option.is_list, metavar=(
            None if option.is_bool else "|".join(map(str, option.choices)) or re.sub(r"list\[(\w+)\]", r"\1",
                                                                                    option.type))))
    return click.Command(name, params=parameters, callback=run, help=about)


def _convert(one: Selected, name: str, source: Path, out: Path, flags: dict[str, object]) -> str:
    """
    Raises:
        CheckpointError: a source that is no Hugging Face directory, or a target that is there already.
        ConfigError: an option's value does not fit.
    """
    from miles_core.config.load import with_values
    from miles_core.config.options import Origin, convert
    from miles_core.config.tables import RunConfig
    from miles_core.plugins import bind

    if not (source / "config.json").is_file():
        raise CheckpointError("not a Hugging Face directory", got="no config.json", who=str(source),
                              fix="give the folder of config.json and *.safetensors", code="not-hugging-face")
    check_free(out)
    options = one.manifest.options
    values = {key: convert(options[key], [*value] if options[key].is_list else value,
                           Origin("flag", f"--{key.replace('_', '-')}"))
              for key, value in flags.items() if value not in (None, ())}
    config = with_values(RunConfig(options={one.manifest.name: values}), f"miles convert {name}",
                         checkpoint__hf_checkpoint=str(source))
    return bind.bind([one], config, "driver").convert[name](source, out)
