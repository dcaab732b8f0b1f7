"""The command line: click commands, one file each, imported when called."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import click

COMMANDS = {
    "run": "Train, or show with --plan what would be done.",
    "report": "Write one HTML page about a run.",
    "watch": "Look at a run while it goes on, in the browser.",
    "doctor": "Say what is wrong with a run, and which side to look at.",
    "diff": "Name the first difference between two runs.",
    "convert": "Convert a checkpoint: Hugging Face to torch_dist, or back.",
    "check-template": "Check a chat template by the token ids that it gives.",
    "plugins": "What is installed; what a run is composed of.",
    "flags": "Every flag, as Markdown.",
    "hooks": "Every hook that a plugin may implement, as Markdown.",
    "completion": "The completion script of a shell.",
}


class Lazy(click.Group):
    """A group whose commands are imported when they are called; --help imports none."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module = importlib.import_module(f"miles_core.cli.{name.replace('-', '_')}")
        return module.command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(self, ctx: click.Context, args: list[str]):
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, 1)
            error.message += f" Did you mean {near[0]!r}?" if near else ""
            raise


@click.group(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
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
    """The entry point."""
    main_of(lambda: cli(standalone_mode=False))


def main_of(body: Callable[[], object]) -> None:
    """Run a program: errors of Miles become a sentence and an exit code."""
    from miles_core.errors import MilesError

    try:
        body()
    except click.exceptions.Abort:
        raise SystemExit(130) from None
    except click.ClickException as error:
        error.show()
        raise SystemExit(error.exit_code) from None
    except MilesError as error:
        click.secho("Error: ", fg="red", bold=True, nl=False, err=True)
        click.echo(str(error), err=True)
        for note in getattr(error, "__notes__", ()):
            click.echo(f"  {note}", err=True)
        raise SystemExit(error.exit_code) from None
    except click.exceptions.Exit as leave:
        raise SystemExit(leave.exit_code) from None
