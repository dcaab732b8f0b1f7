"""`miles plugins`: what is installed, what a run is composed of, and what installed packages add."""

from __future__ import annotations

import importlib

import click

from miles_core.cli import of_plugin, offered

COMMANDS = {
    "list": ("inventory:list_", "What is installed, and what could be."),
    "info": ("inventory:info", "Everything that a plugin states about itself."),
    "check": ("composition:check", "Whether a run's plugins fit each other; binds every hook."),
    "why": ("composition:why", "Who set a key of a run, in order."),
    "graph": ("composition:graph", "Hooks in call order, and who implements them."),
    "lock": ("composition:lock", "Write down what a run is made of, for run --locked."),
    "diff": ("composition:diff", "How two locks, or two run directories, differ."),
    "install": ("inventory:install", "Install plugins with pip into this Python."),
    "uninstall": ("inventory:uninstall", "Remove plugins with pip from this Python."),
}


class Plugins(click.Group):
    """Commands are imported when they are called; `check` alone imports plugins, those of the run that it binds."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *offered("plugins")]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return of_plugin(name, "plugins")
        module, _, function = COMMANDS[name][0].partition(":")
        return getattr(importlib.import_module(f"miles_core.cli.plugin_{module}"), function)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()]
                               + [(name, offer.help) for name, (_, offer) in offered("plugins").items()])


@click.group("plugins", cls=Plugins)
def command() -> None:
    """Look at plugins; only `check` imports any.

    \b
      miles plugins list
      miles plugins info r3
      miles plugins check examples/demo.toml --plugin r3
      miles plugins why rollout.num_rollout examples/demo.toml --num-rollout 5
      miles plugins lock examples/demo.toml --out plugins.lock
      miles run examples/demo.toml --locked plugins.lock
    """
