"""miles report: a run as one HTML page that needs no network and no server."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from miles_core.errors import RunDirectoryError
from miles_core.reading import reading
from miles_core.record.directory import RunDirectory, publish
from miles_report.page import render
from miles_report.page.document import Limits, document, status_of
from miles_report.page.follow import Follower
from miles_report.page.history import History
from miles_report.page.samples import chosen, excerpt, list_samples, surviving


def write_report(run_dir: str | os.PathLike[str], out: str | os.PathLike[str] | None = None,
                 limits: Limits | None = None, against: Sequence[Path] = ()) -> Path:
    """Write the report of a run, finished or not, and return where it is: `out`, or report.html in the run.

    Args:
        against: runs whose curves are drawn beside its own.

    Raises:
        RunDirectoryError: this is no run, a file of it is damaged, or `out` cannot be written.
    """
    page = made(run_dir, limits, against)
    try:
        return publish(Path(run_dir, "report.html") if out is None else out, page)
    except RunDirectoryError as error:  # of a run that is only read, maybe somebody else's
        error.fix = "write it into another folder, which is there, with -o FILE"
        raise


def made(run_dir: str | os.PathLike[str], limits: Limits | None = None, against: Sequence[Path] = ()) -> str:
    """The same page, not written anywhere.

    Raises:
        RunDirectoryError: this is no run, or a file of it is damaged.
    """
    run = RunDirectory.existing(run_dir)
    with reading(f"{run.path}/", RunDirectoryError):
        data = collect(run, limits or Limits())
        data["against"] = [_curves(RunDirectory.existing(path), limits or Limits()) for path in against]
        return render(f"{data['run']['name']} · Miles", data)[0]


def collect(run: RunDirectory, limits: Limits) -> dict[str, object]:
    """The document with its samples.

    Raises:
        RunDirectoryError: a file of the run is damaged.
    """
    was_held = run.holder() is not None
    history = Follower(run.events).advance()
    data = document(run, history, limits, status_of(run, history, was_held))
    data["samples"], notes = _samples(run, history, limits)
    data["notes"] = notes + data["notes"]
    return data


def _curves(run: RunDirectory, limits: Limits) -> dict[str, object]:
    data = document(run, Follower(run.events).advance(), limits, "")
    return {"name": run.path.resolve().name, "curves": data["curves"]}


def _samples(run: RunDirectory, history: History, limits: Limits) -> tuple[list[dict], list[str]]:
    """The files that go into the page, each with as many whole groups as its share of the limits allows; and notes."""
    files, notes = surviving(list_samples(run), history), []
    shown = chosen(files, limits)
    embedded = [excerpt(item, limits, len(shown)) for item in shown]
    if len(shown) < len(files):
        notes.append(f"{len(shown)} of {len(files)} recorded rollouts and evaluations are in this page.")
    fit = sum(len(file["samples"]) for file in embedded)
    total = fit + sum(file["samples_left"] for file in embedded)
    if fit < total:
        notes.append(f"{fit:,} of {total:,} samples are in this page, in whole groups where possible.")
    if any(file["recorded"] < file["groups"] for file in embedded):
        notes.append("The run recorded only the first groups of some rollouts or evaluations.")
    cut = sum("cut" in sample for file in embedded for sample in file["samples"])
    if cut:
        notes.append(f"{cut:,} responses are cut after {limits.tokens:,} tokens.")
    return embedded, notes
