"""miles doctor RUN: which side to look at, and what to do."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from pathlib import Path

import click

from miles_core.errors import RunDirectoryError
from miles_core.reading import reading


@click.command()
@click.argument("run", required=False, type=click.Path(file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
@click.option("--bundle", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE.tar.gz",
              help="Also pack plan, versions, metrics, the first lines of every log and this answer, without secrets.")
@click.option("--with-samples", is_flag=True,
              help="Put prompts and answers of the first and the last rollout in the bundle.")
def doctor(run: Path | None, as_json: bool, bundle: Path | None, with_samples: bool) -> None:
    """Say what is wrong with RUN, the folder that --run-dir named; default: the newest one in runs/.

    The answer begins with the side to look at: rollout side, training side, both sides, or neither. Then come findings,
    errors first: what was seen and where, why it matters, what to do. Only files are read, so a run that is still
    going, or was killed, can be looked at too, also on another machine.

    \b
      miles doctor runs/demo
      miles doctor runs/demo --bundle report.tar.gz

    Exit codes: 0 healthy, or only warnings and notes; 1 there is an error; 2 this is no run.
    """
    from miles_report.doctor.record import Record, newest
    from miles_report.doctor.rules import examine

    if with_samples and bundle is None:
        raise click.UsageError("--with-samples says what goes into a bundle: give --bundle FILE.tar.gz too")
    run = newest() if run is None else run
    with reading(f"{run}/", RunDirectoryError):
        record = Record.load(run)
        diagnosis = examine(record)
    click.echo(json.dumps(diagnosis.to_json()) if as_json else "\n".join(map(fitted, diagnosis.text())))
    if bundle is not None:
        from miles_report.doctor.bundle import write_bundle

        left = write_bundle(record, diagnosis, bundle, samples=with_samples)
        click.echo(f"Wrote {bundle} ({bundle.stat().st_size / 1e3:.0f} kB). {left}", err=True)
    raise SystemExit(diagnosis.exit_code)


def fitted(line: str) -> str:
    """On a terminal, a line of the answer in lines between whose words it breaks; a program gets it whole."""
    if not sys.stdout.isatty():
        return line
    return textwrap.fill(line, shutil.get_terminal_size().columns, subsequent_indent=" " * 9 if line[:1] == " " else "",
                         break_long_words=False, break_on_hyphens=False)


command = doctor
