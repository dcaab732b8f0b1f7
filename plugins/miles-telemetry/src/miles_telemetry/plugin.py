"""The plugin: options and hooks. The endpoint is in prometheus.py, the spans are in spans.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_report.tracker import without_password

from miles_core.config import RunConfig, option
from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from miles_telemetry.prometheus import Endpoint
    from miles_telemetry.spans import Spans


@dataclass(frozen=True, kw_only=True)
class TelemetryOptions:
    """What is shown to whom."""

    use_prometheus: bool = option(
        True, "Show the latest metrics to Prometheus; --no-use-prometheus for spans alone.",
        flags=("--use-prometheus",), off=("--no-use-prometheus",),
    )
    port: int = option(
        9090, "Port of the endpoint; 0 for a free one, which prometheus.json in the run's folder names.",
        flags=("--prometheus-port",), within=(0, 65535))
    host: str = option("127.0.0.1", "Address that the endpoint listens on; anybody who reaches it may read it.")
    run_name: str | None = option(
        None, "Label `run` of every figure; default: the run file's name.", flags=("--prometheus-run-name",)
    )
    endpoint: str | None = option(
        None, "Where spans go by OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces; default: the environment's "
        "OTEL_EXPORTER_OTLP_ENDPOINT, and none without it."
    )
    file: str | None = option(None, "Where spans go as lines of JSON; may hold {run_dir}.")


class Telemetry:
    """Shows metrics to Prometheus, and the stages of every rollout to OpenTelemetry."""

    def __init__(self, options: TelemetryOptions):
        self.options = options
        self._endpoint: Endpoint | None = None
        self._targets: Path | None = None
        self._spans: Spans | None = None

    @hookimpl
    def check(self, config: RunConfig, note: Callable[[str], None]) -> RunConfig:
        """No password in the address."""
        without_password(self.options.endpoint, "telemetry.endpoint", "set OTEL_EXPORTER_OTLP_HEADERS")
        return config

    @hookimpl
    def begin(self, plan: dict[str, Any], run_id: str, resumed_from: int | None, run_dir: Path) -> None:
        """Listens, and opens the span of this start."""
        from miles_telemetry.prometheus import Endpoint
        from miles_telemetry.spans import exporters, opened

        options = self.options
        if self._endpoint is not None or self._spans is not None:
            return
        if sinks := exporters(options.endpoint, options.file and options.file.replace("{run_dir}", str(run_dir))):
            self._spans = opened(sinks, plan, run_id, resumed_from)
        if options.use_prometheus:
            self._endpoint = Endpoint(options.host, options.port, options.run_name or plan["name"])
            self._targets = Path(run_dir, "prometheus.json")  # for Prometheus's file_sd_configs
            self._targets.write_text(json.dumps([{"targets": [f"{options.host}:{self._endpoint.port}"]}]))

    @hookimpl
    def metrics(self, rollout_id: int, values: dict[str, float]) -> None:
        """The figures are the latest; a rollout or an evaluation is a span."""
        if self._endpoint is not None:
            self._endpoint.show(rollout_id, values)
        if self._spans is not None:
            self._spans.rollout(rollout_id, values)

    @hookimpl
    def finish(self, status: str) -> None:
        """Sends what is left, and no longer listens."""
        endpoint, self._endpoint = self._endpoint, None
        spans, self._spans = self._spans, None
        if endpoint is not None:
            endpoint.close()
        if self._targets is not None:
            self._targets.unlink(missing_ok=True)
        if spans is not None:
            spans.close(status)
