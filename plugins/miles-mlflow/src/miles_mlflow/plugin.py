"""The plugin: options, hooks, and the run at MLflow. The library is imported when the run begins."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_report.tracker import COLUMNS, Outbox, Row, Start, without_password

from miles_core.config import RunConfig, option
from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from miles_core.types import Sample

RUN = "miles.run_id"
"""Tag by which a later start finds the run."""

STATUS = (("completed", "FINISHED"), ("failed", "FAILED"))
"""Ends of a run -> MLflow's; all others are KILLED, from which a run goes on."""


@dataclass(frozen=True, kw_only=True)
class MlflowOptions:
    """Where a run is to be seen, and what of its answers."""

    use_mlflow: bool = option(
        True, "Send to MLflow; --no-use-mlflow keeps the plugin named but idle.", flags=("--use-mlflow",),
        off=("--no-use-mlflow",),
    )
    tracking_uri: str | None = option(
        None, "Address of a server, or a folder; default: MLFLOW_TRACKING_URI, else mlruns in the run's folder.",
        flags=("--mlflow-tracking-uri",),
    )
    experiment_name: str = option("miles", "Experiment; made where there is none.", flags=("--mlflow-experiment-name",))
    run_name: str | None = option(None, "Name of the run; default: the run file's.", flags=("--mlflow-run-name",))
    run_id: str | None = option(
        None, "MLflow's id of a run to go on with; default: the run of this run directory.", flags=("--mlflow-run-id",)
    )
    tags: dict[str, object] | None = option(None, "Tags of the run: name and value.")
    sample_rows: int = option(8, "Rows of a table of sampled answers; 0 for none.", within=(0,))
    sample_interval: int = option(10, "Rollouts between two tables; an evaluation always has one.", within=(1,))
    system: bool = option(True, "Figures of CPUs, GPUs, memory, disk and network.")


class Mlflow:
    """Sends metrics, evaluations and sampled answers to MLflow."""

    def __init__(self, options: MlflowOptions):
        self.options = options
        self._outbox = Outbox(self, rows=options.sample_rows, every=options.sample_interval)
        self._client: Any = None
        self._id = ""
        self._monitor: Any = None

    @hookimpl
    def check(self, config: RunConfig, note: Callable[[str], None]) -> RunConfig:
        """No password in the address."""
        without_password(self.options.tracking_uri, "mlflow.tracking_uri",
                         "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD")
        return config

    @hookimpl
    def begin(self, plan: dict[str, Any], run_id: str, resumed_from: int | None, run_dir: Path) -> None:
        """Opens the run, or goes on with it."""
        if self.options.use_mlflow:
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
        uri = self.options.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or str(start.run_dir / "mlruns")
        if "://" not in uri and uri != "databricks":
            uri = Path(uri).resolve().as_uri()
        if uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # it would rather have a database
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        experiment = self._experiment()
        earlier = client.search_runs([experiment], f"tags.`{RUN}` = '{start.run_id}'", max_results=1)
        if known := self.options.run_id or (earlier[0].info.run_id if earlier else None):
            self._id = known
            client.update_run(known, status="RUNNING")
        else:
            tags = {**{name: str(value) for name, value in (self.options.tags or {}).items()}, RUN: start.run_id}
            made = client.create_run(experiment, run_name=self.options.run_name or start.name, tags=tags)
            self._id = made.info.run_id
            params = [Param(key, str(value)[:6000]) for key, value in start.options.items()]
            for first in range(0, len(params), 100):  # as many as a request may have
                client.log_batch(self._id, params=params[first:first + 100])
        client.log_dict(self._id, start.plan, f"plan/{start.first}.json")
        if self.options.system:
            self._watch(uri)
        return f"run {self._id} of experiment {self.options.experiment_name} at {uri}"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See Service."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        points = [Metric(flat(name), value, now, step) for name, value in values.items()]
        for first in range(0, len(points), 1000):
            self._client.log_batch(self._id, metrics=points[first:first + 1000])

    def table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """See Service. An artifact in the form of MLflow's own tables."""
        cells = [[row[key] for key in COLUMNS] for row in rows]
        self._client.log_dict(self._id, {"columns": list(COLUMNS), "data": cells}, f"{name}/{step:07d}.json")

    def close(self, status: str) -> None:
        """See Service."""
        if self._monitor is not None:
            self._monitor.finish()
        self._client.set_tag(self._id, "miles.status", status)
        self._client.set_terminated(self._id, dict(STATUS).get(status, "KILLED"))

    def _experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        name = self.options.experiment_name
        if (known := self._client.get_experiment_by_name(name)) is not None:
            return str(known.experiment_id)
        try:
            return str(self._client.create_experiment(name))
        except MlflowException:  # another run was faster
            if (known := self._client.get_experiment_by_name(name)) is None:
                raise
            return str(known.experiment_id)

    def _watch(self, uri: str) -> None:
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        logging.getLogger("mlflow.system_metrics").setLevel(logging.WARNING)  # the terminal is the run's
        monitor: Any = SystemMetricsMonitor  # without types
        self._monitor = monitor(self._id, resume_logging=True, tracking_uri=uri)
        self._monitor.start()


def flat(name: str) -> str:
    """A metric's name as MLflow takes it, which refuses all values that come with another: eval/sums-pass@1 is
    eval/sums-pass_at_1. One slash stays: in a folder of files eval/sums cannot be a file and have others below it."""
    first, slash, below = re.sub(r"[^\w.\-/: ]", "_", name.replace("@", "_at_")).partition("/")
    return first + slash + below.replace("/", ".")
