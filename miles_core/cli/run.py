"""`miles run`: a run file and flags become a plan, and the plan a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from miles_core.config.options import Option


class RunCommand(click.Command):
    """Takes any flag; --help lists them by table."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from miles_core.config.options import options_of
        from miles_core.config.tables import TABLES

        super().format_options(ctx, formatter)
        for table, kind in TABLES.items():
            rows = []
            for option in options_of(table, kind).values():
                default = "" if option.default in (None, False, []) else f"  [default: {_shown(option.default)}]"
                rows.append((f"--{option.name.replace('_', '-')}{_placeholder(option)}", option.help + default))
            purpose, _, more = (kind.__doc__ or "").partition("; ")
            with formatter.section(f"[{table}] {purpose.partition('.')[0]}"):
                formatter.write_dl(rows) if rows else formatter.write_text(more or purpose)
        formatter.write_paragraph()
        formatter.write_text("Megatron-core's fields and Megatron-LM's names for them are flags too, and so are the "
                             "arguments of SGLang and its router, as --sglang-NAME and --router-NAME: `miles flags` "
                             "lists them. Options of a plugin are --PLUGIN.OPTION.")

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Every flag, beside the options that click knows."""
        from miles_core.cli.completion import run_flags

        more = run_flags(incomplete) if incomplete.startswith("-") else []
        return [*super().shell_complete(ctx, incomplete), *more]


def _placeholder(option: Option) -> str:
    """What follows the flag: nothing, the choices, or a word for the type."""
    if option.is_bool:
        return ""
    if option.choices:
        return " " + "|".join(map(str, option.choices))
    kind = option.type.split(" | ")[0]
    return f" {kind[5:-1].partition('[')[0].upper()}..." if option.is_list else f" {kind.partition('[')[0].upper()}"


def _shown(default: object) -> object:
    return "on" if default is True else default


def _words(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from miles_core.cli.completion import run_words

    return run_words(ctx, param, incomplete)


SCRIPTS: dict[str, tuple[str, ...]] = {"train.py": (), "train_async.py": ("--train-async",)}
"""Where an old launch script names one of these, `miles run` may stand before it; the second samples ahead."""


def split(words: tuple[str, ...]) -> tuple[Path | None, tuple[str, ...]]:
    """Run file, None where none is named, and flags."""
    named = bool(words) and not words[0].startswith("-")
    return (Path(words[0]), words[1:]) if named else (None, words)


@click.command("run", cls=RunCommand, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.option("--plan", "plan_only", is_flag=True, help="Print what would run and stop. Imports no plugin.")
@click.option("--json", "as_json", is_flag=True, help="With --plan: as JSON.")
@click.option("--locked", type=click.Path(exists=True, path_type=Path), metavar="FILE",
              help="Refuse to run anything but what this lock, or this run directory, says.")
@click.option("--live/--no-live", default=None, help="The live view; default: on a terminal.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, shell_complete=_words,
                metavar="[RUN_FILE] [--plugin|--no-plugin|--preset NAME]... [FLAGS]...")
def command(plan_only: bool, as_json: bool, locked: Path | None, live: bool | None, words: tuple[str, ...]) -> None:
    """Train as a run file and flags say; flags win. ./miles.toml is read when no run file is named.

    \b
      miles run examples/demo.toml
      miles run examples/demo.toml --plan
      miles run recipe.toml --plugin dapo-filter --over-sampling-batch-size 64
      miles run --hf-checkpoint models/tiny --prompt-data train.jsonl --label-key label \\
        --rm-type math --rollout-batch-size 32 --n-samples-per-prompt 8 --num-rollout 10
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
        import json

        click.echo(json.dumps(plan.to_json(), indent=1) if as_json else plan.to_text(), nl=as_json)
        return
    from miles_core.execute import execute

    raise SystemExit(execute(plan, live=live))
