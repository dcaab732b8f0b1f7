"""The plugin: options, hooks, and the run at Trackio. The library is imported when the run begins."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_report.tracker import COLUMNS, Outbox, Row, Start, without_password

from miles_core.config import RunConfig, option
from miles_core.errors import ConfigError
from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from miles_core.types import Sample


@dataclass(frozen=True, kw_only=True)
class TrackioOptions:
    """Where a run is to be seen, and what of its answers."""

    project: str = option("miles", "Project.")
    name: str | None = option(
        None, "Name of the run, by which Trackio knows it; default: the run file's and the start of the run's id."
    )
    group: str | None = option(None, "Group of runs.")
    space_id: str | None = option(None, "Hugging Face Space that shows the run, made where there is none (HF_TOKEN).")
    server_url: str | None = option(None, "Address of a Trackio server (TRACKIO_WRITE_TOKEN).")
    folder: str | None = option(None, "Where databases are kept; default: Trackio's own, TRACKIO_DIR.")
    sample_rows: int = option(8, "Rows of a table of sampled answers; 0 for none.", within=(0,))
    sample_interval: int = option(10, "Rollouts between two tables; an evaluation always has one.", within=(1,))
    system: bool = option(True, "Figures of CPUs, GPUs and memory.")


class Trackio:
    """Sends metrics, evaluations and sampled answers to Trackio."""

    def __init__(self, options: TrackioOptions):
        self.options = options
        self._outbox = Outbox(self, rows=options.sample_rows, every=options.sample_interval)
        self._run: Any = None

    @hookimpl
    def check(self, config: RunConfig, note: Callable[[str], None]) -> RunConfig:
        """No token in the address.

        Raises:
            ConfigError: there is one.
        """
        without_password(self.options.server_url, "trackio.server_url", "set TRACKIO_WRITE_TOKEN")
        if "write_token=" in (self.options.server_url or ""):
            raise ConfigError("an address with a token would be kept in the run directory", got="...?write_token=***",
                              who="trackio.server_url", fix="leave the token out, and set TRACKIO_WRITE_TOKEN",
                              code="address-holds-token")
        return config

    @hookimpl
    def begin(self, plan: dict[str, Any], run_id: str, resumed_from: int | None, run_dir: Path) -> None:
        """Opens the run, or goes on with it."""
        self._outbox.begin(plan, run_id, resumed_from, run_dir)

    @hookimpl
    def metrics(self, rollout_id: int, values: dict[str, float]) -> None:
        """A point each."""
        self._outbox.metrics(rollout_id, values)

    @hookimpl
    def samples(self, rollout_id: int, dataset: str | None, samples: Sequence[Sample]) -> None:
        """A table, when one is due."""
        self._outbox.samples(rollout_id, dataset, samples)

    @hookimpl
    def finish(self, status: str) -> None:
        """Waits until all is sent, within bounds."""
        self._outbox.finish(status)

    def open(self, start: Start) -> str | None:
        """See Service."""
        options = self.options
        if options.folder:
            os.environ["TRACKIO_DIR"] = str(Path(options.folder).resolve())  # read when the library is imported
        import trackio

        name = options.name or f"{start.name}-{start.run_id[:8]}"
        self._run = trackio.init(
            project=options.project, name=name, group=options.group, space_id=options.space_id,
            server_url=options.server_url, resume="allow", embed=False,
            config={**start.options, "run_id": start.run_id, "plan_digest": start.plan.get("digest")},
            auto_log_cpu=None if options.system else False, auto_log_gpu=None if options.system else False)
        return f"run {name}: trackio show --project {options.project}"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See Service."""
        self._run.log(dict(values), step=step)

    def table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """See Service."""
        import trackio

        table = trackio.Table(columns=[*COLUMNS], data=[[row[key] for key in COLUMNS] for row in rows])
        self._run.log({name: table}, step=step)

    def close(self, status: str) -> None:
        """See Service."""
        self._run.finish()
