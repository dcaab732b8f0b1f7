"""The command line: click commands, one file each, imported when called."""

from __future__ import annotations

import atexit
import difflib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from miles_core.errors import MilesError, OwnerError, clean

if TYPE_CHECKING:
    from miles_core.plugins.manifest import Manifest, Offer

COMMANDS = {
    "run": ("run:command", "Train, or show with --plan what would be done."),
    "plugins": ("plugins:command", "What is installed; what a run is composed of."),
    "completion": ("completion:command", "The completion script of a shell."),
}


class Lazy(click.Group):
    """A group whose commands are imported when they are called; --help imports none. Beside the core's own commands
    there are those of installed plugins (hook `commands`), known by their manifests.

    Args:
        own: name -> (module of this package and what is in it, the line of --help).
        group: "" for `miles` itself, else the word under which plugins offer further commands.
    """

    def __init__(self, *args: Any, own: Mapping[str, tuple[str, str]], group: str = "", **more: Any):
        super().__init__(*args, **more)
        self.own, self.group = own, group

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._lines())

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.own:
            return of_plugin(name, self.group)
        module, _, function = self.own[name][0].partition(":")
        return getattr(importlib.import_module(f"miles_core.cli.{module}"), function)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(self._lines().items()))

    def _lines(self) -> dict[str, str]:
        """Name -> its line of --help; a plugin's command takes the place of none of ours."""
        own = {name: text for name, (_, text) in self.own.items()}
        return own | {name: offer.help for name, (_, offer) in offered(self.group).items() if name not in own}

    def invoke(self, ctx: click.Context):
        try:
            return super().invoke(ctx)
        except click.exceptions.Exit as leave:  # click would return the code, like what a command returns
            raise SystemExit(leave.exit_code) from None

    def resolve_command(self, ctx: click.Context, args: list[str]):
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = difflib.get_close_matches(args[0], self.list_commands(ctx), 1)
            error.message += f" Did you mean {near[0]!r}?" if near else ""
            raise


def offered(group: str) -> dict[str, tuple[Manifest, Offer]]:
    """Commands of the plugins that every run has, and of all that are installed, by name; none is imported.

    Args:
        group: "" for those of `miles` itself; "plugins" for those that are offered as "plugins NAME".

    Raises:
        OwnerError: two plugins offer one name.
    """
    from miles_core.plugins.select import readable

    commands: dict[str, tuple[Manifest, Offer]] = {}
    for manifest in readable("commands"):
        for offer in (one for one in manifest.offers if one.hook == "commands"):
            if offer.name in commands:
                raise OwnerError(f"two plugins offer the command {offer.name!r}: {commands[offer.name][0].name} and "
                                 f"{manifest.name}", code="command-offered-twice", fix="uninstall one of them")
            commands[offer.name] = (manifest, offer)
    return {name.rpartition(" ")[2]: owner for name, owner in commands.items() if name.rpartition(" ")[0] == group}


def of_plugin(name: str, group: str) -> click.Command | None:
    """The command that a plugin offers under a name, made by the plugin; None where nobody does. An UnknownPluginError
    says how to install the official plugin that does."""
    from miles_core.config.tables import RunConfig
    from miles_core.plugins import bind
    from miles_core.plugins.scan import KNOWN
    from miles_core.plugins.select import built_in, select

    whole, owners = f"{group} {name}".strip(), offered(group)
    plugin = owners[name][0].name if name in owners else next(
        (one for one, offers in KNOWN.items() if f"commands:{whole}" in offers), None)
    if plugin is None:
        return None
    (one,) = [one for one in built_in() if one.manifest.name == plugin] or select([(plugin, f"miles {whole}")], ())
    return bind.bind([one], RunConfig(), "driver").commands[whole]()


@click.group(cls=Lazy, own=COMMANDS, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="miles-core", message="%(version)s")
def cli() -> None:
    """Reinforcement-learning post-training for large language models.

    \b
      miles run examples/demo.toml --plan         what would run, and why
      miles run examples/demo.toml --lr 1e-4      run it, one value changed
      miles watch runs/demo                       look at it while it goes on
      miles report runs/demo                      a page about it
      miles doctor runs/demo                      what is wrong with it, and on which side
      miles diff runs/a runs/b                    where two runs part
      miles plugins list                          what is installed

    Plugins are named by a run: plugins = ["grpo", "math"] in its file, or --plugin NAME. Installed never means active.
    """


def main() -> None:
    """The entry point of the console script."""
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:  # else libraries print into what the run opens first
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdout, sys.stderr = sys.stdout or os.fdopen(1, "w"), sys.stderr or os.fdopen(2, "w")
    sys.stdout.reconfigure(errors="replace")  # what no encoding has, or not this one; as wide, for the live view
    try:
        command_line()
    except SystemExit as leave:
        if leave.code == 130 and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # an impatient second Ctrl-C would only show how Python ends
        if isinstance(leave.code, int):
            _leave(leave.code)
        raise


def _leave(code: int) -> None:
    """End the process here and now where daemon threads are at work. A thread in the middle of a backward pass runs
    C++. It cannot be unwound when the interpreter is torn down under it: the process would abort and lose its exit
    code."""
    if any(thread.daemon for thread in threading.enumerate()):
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def command_line() -> None:
    """What the words of this process's command line say; a SystemExit has the exit code, unless a command just ends.
    Errors of Miles become a sentence."""
    try:
        cli(standalone_mode=False)
    except click.exceptions.Abort:
        raise SystemExit(130) from None
    except click.ClickException as error:
        error.show()
        raise SystemExit(error.exit_code) from None
    except (MilesError, OSError) as error:
        if not isinstance(error, MilesError):
            from miles_core.record.directory import FULL

            if error.errno not in FULL:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is left of the output in its buffer
        lines = [clean(str(error)), *(f"  {clean(note)}" for note in getattr(error, "__notes__", ()))]
        click.echo(click.style("Error: ", fg="red", bold=True) + "\n".join(lines), err=True)
        raise SystemExit(getattr(error, "exit_code", 1)) from None
