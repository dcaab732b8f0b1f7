"""`miles completion SHELL`: the script that makes a shell complete commands, flags and their values."""

from __future__ import annotations

from collections.abc import Iterator

import click
from click.shell_completion import CompletionItem, get_completion_class

from miles_core.config.options import Option


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the completion script of a shell; load it where the shell starts.

    \b
      eval "$(miles completion bash)"        ~/.bashrc
      eval "$(miles completion zsh)"         ~/.zshrc
      miles completion fish | source         ~/.config/fish/config.fish

    Every flag of `miles run` is completed, those of installed plugins and of Megatron-core included.
    """
    from miles_core.cli import cli

    click.echo(get_completion_class(shell)(cli, {}, "miles", "_MILES_COMPLETE").source())


def run_flags(incomplete: str) -> list[CompletionItem]:
    """Flags of `miles run` that begin so; the many of Megatron-core and SGLang once there is a letter to go by."""
    from miles_core.config.flags import NAMING, spellings
    from miles_core.config.surfaces import surfaces_of
    from miles_core.plugins.select import built_in

    flags = {flag: option.help for option in options() for side in spellings(option) for flag in side} | NAMING
    for surface in surfaces_of(built_in()):
        for flag, text in surface.complete(incomplete):
            flags.setdefault(flag, text)
    return [CompletionItem(flag, help=text) for flag, text in flags.items() if flag.startswith(incomplete)]


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


def _choices() -> Iterator[tuple[str, tuple[str, ...]]]:
    """(flag, its values): those of a Literal type, and the names that plugins offer for a named hook."""
    from miles_core.config.flags import spellings
    from miles_core.plugins.scan import KNOWN
    from miles_core.plugins.select import built_in, readable

    stated = [*(one.manifest for one in built_in()), *readable()]
    offers = [(offer.hook, offer.name) for one in stated for offer in one.offers]
    offers += [tuple(offer.split(":")) for many in KNOWN.values() for offer in many]
    hooks = {"advantage_estimator": "advantage", "rm_type": "reward"}
    for option in options():
        named = tuple(dict.fromkeys(name for hook, name in offers if hook == hooks.get(option.name, option.name)))
        for flag in spellings(option)[0]:
            yield flag, tuple(map(str, option.choices)) or named


def options() -> Iterator[Option]:
    """The core's options in the order of the tables, then those of the installed plugins."""
    from miles_core.config.options import options_of
    from miles_core.config.tables import TABLES
    from miles_core.plugins.select import readable

    for table, declared in TABLES.items():
        yield from options_of(table, declared).values()
    for manifest in readable():
        yield from manifest.options.values()
