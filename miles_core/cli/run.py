"""`miles run`: a run file and flags become a plan, and the plan a run."""

from __future__ import annotations

from pathlib import Path

import click


class RunCommand(click.Command):
    """Takes any flag; --help lists them by table."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from miles_core.config.options import options_of
        from miles_core.config.tables import TABLES

        super().format_options(ctx, formatter)
        for table, kind in TABLES.items():
            rows = []
            for option in options_of(table, kind).values():
                value = "" if option.is_bool else " " + ("|".join(map(str, option.choices)) or option.type.split(" | ")[0].split("[")[0].upper())
                default = "" if option.default in (None, False, []) else f"  [default: {option.default}]"
                rows.append((f"--{option.name.replace('_', '-')}{value}", option.help + default))
            if rows:
                with formatter.section(f"[{table}] {(kind.__doc__ or '').partition(chr(10))[0]}"):
                    formatter.write_dl(rows)
        formatter.write_paragraph()
        formatter.write_text("Megatron-core's fields and Megatron-LM's names for them are flags too: docs/flags.md lists them. "
                             "Options of a plugin are --PLUGIN.OPTION.")


@click.command("run", cls=RunCommand, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.option("--plan", "plan_only", is_flag=True, help="Print what would run and stop. Imports no plugin.")
@click.option("--json", "as_json", is_flag=True, help="With --plan: as JSON.")
@click.option("--live/--no-live", default=None, help="The live view; default: on a terminal.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[RUN_FILE] [--plugin NAME]... [FLAGS]...")
def command(plan_only: bool, as_json: bool, live: bool | None, words: tuple[str, ...]) -> None:
    """Train as a run file and flags say; flags win. ./miles.toml is read when no run file is named.

    \b
      miles run examples/demo.toml
      miles run examples/demo.toml --plan
      miles run recipe.toml --plugin dapo-filter --over-sampling-batch-size 64
      miles run --hf-checkpoint models/tiny --prompt-data train.jsonl --label-key label \\
        --rm-type math --rollout-batch-size 32 --n-samples-per-prompt 8 --num-rollout 10
    """
    from miles_core.plugins.plan import prepare

    run_file = Path(words[0]) if words and not words[0].startswith("-") else None
    plan = prepare(run_file, words[1:] if run_file else words)
    if plan_only:
        import json

        click.echo(json.dumps(plan.to_json(), indent=1) if as_json else plan.to_text(), nl=as_json)
        return
    from miles_core.execute import execute

    raise SystemExit(execute(plan, live=live))
