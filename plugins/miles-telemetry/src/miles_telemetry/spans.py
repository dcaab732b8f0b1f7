"""Spans: a trace for each start of a run, a span for each rollout, and in it one for each stage.

A stage's seconds are measured by the run, and spans are made of them when the rollout is reported: each ends where the
next begins, the last one now. Where sampling runs ahead of training, "rollout" is the time that training waited.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.trace import Status, StatusCode, Tracer, set_span_in_context

from miles_core.record.events import stage_seconds

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

SECOND = 1_000_000_000


class Lines(ConsoleSpanExporter):
    """A file with one span a line."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = path.open("a", encoding="utf-8")
        super().__init__(out=self._file, formatter=lambda span: span.to_json(indent=None) + "\n")

    def shutdown(self) -> None:
        """Close the file."""
        self._file.close()


def exporters(endpoint: str | None, file: str | None) -> list[SpanExporter]:
    """Where spans go; nowhere by default."""
    sinks: list[SpanExporter] = [] if file is None else [Lines(Path(file))]
    if endpoint or any(os.environ.get(name) for name in ENDPOINTS):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        sinks.append(OTLPSpanExporter(endpoint=endpoint, timeout=5))
    return sinks


def opened(sinks: Sequence[SpanExporter], plan: Mapping[str, Any], run_id: str, resumed_from: int | None) -> Spans:
    """The trace of a start. Spans wait in a bounded queue, and a thread sends them."""
    resource = Resource.create({"service.name": "miles", "service.instance.id": run_id, "miles.run": plan["name"]})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    for sink in sinks:
        provider.add_span_processor(BatchSpanProcessor(sink))
    start = {"miles.plan": plan.get("digest", ""), "miles.first_rollout": resumed_from or 0}
    return Spans(provider, provider.get_tracer("miles"), start)


class Spans:
    """The trace of one start."""

    def __init__(self, provider: TracerProvider, tracer: Tracer, attributes: Mapping[str, Any]):
        self._provider, self._tracer = provider, tracer
        self._run: Any = tracer.start_span("run", attributes=dict(attributes))

    def rollout(self, rollout_id: int, values: Mapping[str, float]) -> None:
        """A span that ends now, with its stages in the order of the loop; metrics are its attributes."""
        stages = stage_seconds(values)
        now = time.time_ns()
        begin = now - int(sum(stages.values()) * SECOND)
        name = "evaluation" if all(key.startswith("eval/") for key in values) else "rollout"
        context = set_span_in_context(self._run)
        whole = self._tracer.start_span(name, context, start_time=begin,
                                        attributes={"miles.rollout_id": rollout_id, **values})
        inside = set_span_in_context(whole)
        for stage, seconds in stages.items():
            end = begin + int(seconds * SECOND)
            self._tracer.start_span(stage, inside, start_time=begin).end(end)
            begin = end
        whole.end(now)

    def close(self, status: str) -> None:
        """The trace is complete; what is left is sent within the exporters' bounds."""
        self._run.set_attribute("miles.status", status)
        if status == "failed":
            self._run.set_status(Status(StatusCode.ERROR))
        self._run.end()
        self._provider.shutdown()
