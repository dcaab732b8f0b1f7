"""miles report RUN: the run as one HTML page."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Output file, - for standard output; default: RUN/report.html.")
@click.option("--against", type=click.Path(path_type=Path), metavar="RUN", multiple=True,
              help="Another run, whose curves are drawn beside; may be repeated.")
@click.option("--open/--no-open", "show", default=False, show_default=True, help="Open it in the web browser.")
def report(run: Path, output: Path | None, against: tuple[Path, ...], show: bool) -> None:
    """Write a report of RUN, the folder that --run-dir named: curves, time, samples, log and plan.

    The page is one file without any reference to the network, so it can be sent around. A run that is still going may
    be reported too. With --against it is compared with other runs, for instance of another algorithm.
    """
    from miles_report.report import made, write_report

    if output == Path("-"):
        if show:
            raise click.UsageError("--open needs a file, and -o - writes none")
        click.echo(made(run, against=against), nl=False)
        return
    page = write_report(run, output, against=against)
    click.echo(f"Wrote {page} ({page.stat().st_size / 1e6:.1f} MB)")
    if show:
        import webbrowser

        webbrowser.open(page.resolve().as_uri())


command = report
