"""`miles run`: a run file and flags become a plan, and the plan a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from miles_core.cli.completion import run_flags, run_words

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from miles_core.config.options import Option
    from miles_core.plugins.manifest import Manifest


class RunCommand(click.Command):
    """Takes any flag; --help lists them by table, those of the plugins that the line names included."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["words"] = tuple(word for word in args if word not in ctx.help_option_names)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from miles_core.config.options import options_of
        from miles_core.config.tables import TABLES

        super().format_options(ctx, formatter)
        for table, kind in TABLES.items():
            purpose, _, more = (kind.__doc__ or "").partition("; ")
            rows = [_described(option, "") for option in options_of(table, kind).values()]
            with formatter.section(f"[{table}] {purpose.partition('.')[0]}"):
                formatter.write_dl(rows) if rows else formatter.write_text(more or purpose)
        for manifest in _named(ctx.meta["words"]):
            if manifest.options:
                with formatter.section(f"[{manifest.name}] {manifest.summary.partition(':')[0].rstrip('.')}"):
                    formatter.write_dl([_described(one, f"{manifest.name}.") for one in manifest.options.values()])
        formatter.write_paragraph()
        formatter.write_text("Megatron-core's fields and Megatron-LM's names for them are flags too, and so are the "
                             "arguments of SGLang and its router, as --sglang-NAME and --router-NAME: `miles flags` "
                             "lists them. Options of a plugin are --PLUGIN.OPTION: `miles run --plugin NAME --help`.")

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Every flag, beside the options that click knows."""
        more = run_flags(incomplete) if incomplete.startswith("-") else []
        return [*super().shell_complete(ctx, incomplete), *more]


def _named(words: tuple[str, ...]) -> list[Manifest]:
    """The plugins of every run, and those of a command line and its run file; errors in these are the run's to tell."""
    from miles_core.config.load import plugins_named
    from miles_core.errors import MilesError
    from miles_core.plugins.select import built_in

    by_name = {one.manifest.name: one.manifest for one in built_in()}
    try:
        by_name |= {one.manifest.name: one.manifest for one in plugins_named(*split(words))}
    except MilesError as error:
        click.secho(f"Options of plugins are left out: {error}", err=True)
    return list(by_name.values())


def _described(option: Option, prefix: str) -> tuple[str, str]:
    shown = "on" if option.default is True else option.default
    default = "" if option.default in (None, False, []) else f"  [default: {shown}]"
    spelled = ", ".join((f"--{prefix}{option.name.replace('_', '-')}", *(option.flags if prefix else ())))
    return f"{spelled}{_placeholder(option)}", option.help + default


def _placeholder(option: Option) -> str:
    """What follows the flag: nothing, the choices, or a word for the type."""
    if option.is_bool:
        return ""
    if option.choices:
        return " " + "|".join(map(str, option.choices))
    kind = option.type.split(" | ")[0]
    return f" {kind[5:-1].partition('[')[0].upper()}..." if option.is_list else f" {kind.partition('[')[0].upper()}"


SCRIPTS = {"train.py": ("--script-defaults",), "train_async.py": ("--script-defaults", "--train-async")}
"""Where an old launch script names one of these, `miles run` may stand before it; the second samples ahead."""


ABOUT_RUNNING = ("--plan", "--json", "--live", "--no-live")
"""Flags of `miles run` that say nothing of what the run is; `miles plugins check` and the like pass over them."""


def split(words: tuple[str, ...]) -> tuple[Path | None, tuple[str, ...]]:
    """Run file, None where none is named, and flags."""
    words = tuple(word for word in words if word not in ABOUT_RUNNING)
    return (Path(words[0]), words[1:]) if words and not words[0].startswith("-") else (None, words)


@click.command("run", cls=RunCommand, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.option("--plan", "plan_only", is_flag=True, help="Print what would run and stop. Imports no plugin.")
@click.option("--json", "as_json", is_flag=True, help="With --plan: as JSON.")
@click.option("--locked", type=click.Path(exists=True, path_type=Path), metavar="FILE",
              help="Refuse to run anything but what this lock, or this run directory, says.")
@click.option("--live/--no-live", default=None, help="The live view; default: on a terminal.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, shell_complete=run_words,
                metavar="[RUN_FILE] [--plugin|--no-plugin|--preset NAME]... [FLAGS]...")
def command(plan_only: bool, as_json: bool, locked: Path | None, live: bool | None, words: tuple[str, ...]) -> None:
    """Train as a run file and flags say; flags win. ./miles.toml is read when no run file is named.

    \b
      miles run examples/demo.toml
      miles run examples/demo.toml --plan
      miles run recipe.toml --plugin dapo-filter --over-sampling-batch-size 64
      miles run --hf-checkpoint models/tiny --prompt-data train.jsonl \\
        --label-key label --rm-type math --num-rollout 10 \\
        --rollout-batch-size 32 --n-samples-per-prompt 8
    """
    from miles_core.plugins.plan import prepare

    run_file, words = split(words)
    if run_file is not None and (preset := SCRIPTS.get(run_file.name)) is not None:
        run_file, words = None, (*words, *preset)
    plan = prepare(run_file, words)
    if locked is not None:
        from miles_core.plugins import lock

        lock.check(lock.read(locked), plan, f"--locked {locked}")
    if plan_only:
        click.echo(json.dumps(plan.to_json(), indent=1) if as_json else plan.to_text(), nl=as_json)
        return
    from miles_core.execute import execute

    raise SystemExit(execute(plan, live=live))
