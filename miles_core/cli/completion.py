"""`miles completion SHELL`: the script that makes a shell complete commands, flags and their values."""

from __future__ import annotations

from collections.abc import Iterator

import click
from click.shell_completion import CompletionItem

from miles_core.config.options import Option

WHERE = {
    "bash": 'eval "$(miles completion bash)"                   in ~/.bashrc',
    "zsh": 'eval "$(miles completion zsh)"                    in ~/.zshrc',
    "fish": "miles completion fish | source                   in ~/.config/fish/config.fish",
}


@click.command("completion")
@click.argument("shell", type=click.Choice(list(WHERE)))
def command(shell: str) -> None:
    """Print the completion script of a shell; load it where the shell starts.

    \b
      eval "$(miles completion bash)"        ~/.bashrc
      eval "$(miles completion zsh)"         ~/.zshrc
      miles completion fish | source         ~/.config/fish/config.fish

    Every flag of `miles run` is completed, those of installed plugins and of Megatron-core included.
    """
    from click.shell_completion import get_completion_class

    from miles_core.cli import cli

    click.echo(get_completion_class(shell)(cli, {}, "miles", "_MILES_COMPLETE").source())


_SELECTING = {"--no-plugin": "Take a plugin out again, also one of a preset.",
              "--preset": "Plugins and values under a name that a plugin offers."}


def run_flags(incomplete: str) -> list[CompletionItem]:
    """Flags of `miles run` that begin so; the many of Megatron-core and SGLang once there is a letter to go by."""
    from miles_core.config.surfaces import surfaces_of
    from miles_core.plugins.select import built_in

    flags = {flag: text for flag, text in _own_flags() if flag.startswith(incomplete)}
    for surface in surfaces_of(built_in()):
        for flag, text in surface.complete(incomplete):
            flags.setdefault(flag, text)
    if "--plugin".startswith(incomplete):
        flags["--plugin"] = "Enable a plugin, by name or file; may be repeated."
    flags |= {flag: text for flag, text in _SELECTING.items() if flag.startswith(incomplete)}
    return [CompletionItem(flag, help=text) for flag, text in flags.items()]


def run_words(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """What may follow: the values of a flag that has a list of them, plugins after --plugin, else a file."""
    words = ctx.params.get("words") or ()
    last = words[-1] if words else ""
    if last == "--plugin":
        return plugins(ctx, param, incomplete)
    values = dict(_choices()).get(last.replace("_", "-"))
    if values:
        return [CompletionItem(value) for value in values if value.startswith(incomplete)]
    return [CompletionItem(incomplete, type="file")]


def plugins(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Installed plugins that begin so, else a file."""
    from miles_core.plugins.scan import installed

    names = [one.name for one in installed() if one.name.startswith(incomplete)]
    return [CompletionItem(name) for name in names] or [CompletionItem(incomplete, type="file")]


def _own_flags() -> Iterator[tuple[str, str]]:
    """(flag, help) of the core's options and of the installed plugins'."""

    for option in options():
        on, off = spellings(option)
        for flag in (*on, *off):
            yield flag, option.help


def _choices() -> Iterator[tuple[str, tuple[str, ...]]]:
    """(flag, its values): those of a Literal type, and the names that plugins offer for a named hook."""
    from miles_core.plugins.scan import KNOWN
    from miles_core.plugins.select import built_in

    offers = [(offer.hook, offer.name) for one in built_in() for offer in one.manifest.offers]
    offers += [tuple(offer.split(":")) for many in KNOWN.values() for offer in many]
    hooks = {"advantage_estimator": "advantage", "rm_type": "reward"}
    for option in options():
        named = tuple(name for hook, name in offers if hook == hooks.get(option.name, option.name))
        for flag in spellings(option)[0]:
            yield flag, tuple(map(str, option.choices)) or named


def options(*, plugins: bool = True) -> Iterator[Option]:
    """The core's options in the order of the tables, then those of the installed plugins."""
    from miles_core.config.options import options_of
    from miles_core.config.tables import TABLES
    from miles_core.plugins.select import readable

    for table, declared in TABLES.items():
        yield from options_of(table, declared).values()
    if plugins:
        for manifest in readable():
            yield from manifest.options.values()


def spellings(option: Option) -> tuple[list[str], list[str]]:
    """(flags that set an option, flags that switch it off), its own name first."""
    from miles_core.config.tables import TABLES

    dashed = option.name.replace("_", "-")
    prefix = "" if option.table in TABLES else f"{option.table}."
    off = [f"--{prefix}no-{dashed}", *option.off] if option.is_bool else []
    return [f"--{prefix}{dashed}", *option.flags], off
