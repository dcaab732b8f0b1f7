"""miles watch RUN: the page of a run, live."""

from __future__ import annotations

import os
from pathlib import Path

import click

from miles_core.errors import RunDirectoryError
from miles_core.reading import reading


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--port", type=click.IntRange(0, 65535), default=0, metavar="N",
              help="Port to listen on; default: any free port.")
@click.option("--host", default="127.0.0.1", show_default=True,
              help="Address to listen on. Other addresses are reachable from outside and show prompts and answers.")
@click.option("--open/--no-open", "show", default=False, show_default=True, help="Open it in the web browser.")
def watch(run: Path, port: int, host: str, show: bool) -> None:
    """Look at RUN, the folder that --run-dir named, while it goes on: the page of `miles report`, kept up to date.

    The run may be over, or not have begun: then the page waits for it. Ctrl-C ends the page and leaves the run alone.
    """
    from miles_report.watch import Server, Watched

    with reading(f"{run}/", RunDirectoryError):
        watched = Watched(run)
        status = watched.document()["run"]["status"]
    server = Server(watched, host, port)
    if not server.loopback:
        click.secho(f"Warning: everybody who reaches {host} can read the prompts and answers of this run.",
                    fg="yellow", err=True, color=False if os.environ.get("NO_COLOR") else None)
    if status == "waiting":
        click.echo(f"There is no run in {run} yet: the page shows it as soon as it begins.")
    click.echo(f"Watching {run} ({status}) at {server.url}  Ctrl-C ends this, and not the run.")
    if show:
        import webbrowser

        webbrowser.open(server.url)
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        click.echo()
    finally:
        server.server_close()


command = watch
