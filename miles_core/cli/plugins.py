"""`miles plugins`: what is installed, what a run is composed of, and what installed packages add."""

from __future__ import annotations

import click

from miles_core.cli import Lazy

COMMANDS = {
    "list": ("plugin_inventory:list_", "What is installed, and what could be."),
    "info": ("plugin_inventory:info", "Everything that a plugin states about itself."),
    "check": ("plugin_composition:check", "Whether a run's plugins fit each other; binds every hook."),
    "why": ("plugin_composition:why", "Who set a key of a run, in order."),
    "graph": ("plugin_composition:graph", "Hooks in call order, and who implements them."),
    "lock": ("plugin_composition:lock", "Write down what a run is made of, for run --locked."),
    "diff": ("plugin_composition:diff", "How two locks, or two run directories, differ."),
    "install": ("plugin_inventory:install", "Install plugins with pip into this Python."),
    "uninstall": ("plugin_inventory:uninstall", "Remove plugins with pip from this Python."),
}


@click.group("plugins", cls=Lazy, own=COMMANDS, group="plugins")
def command() -> None:
    """Look at plugins; only `check` and `doctor` import any.

    \b
      miles plugins list
      miles plugins info r3
      miles plugins check examples/moe.toml --plugin r3
      miles plugins why rollout.num_rollout examples/demo.toml --num-rollout 5
      miles plugins lock examples/demo.toml --out plugins.lock
      miles run examples/demo.toml --locked plugins.lock
    """
