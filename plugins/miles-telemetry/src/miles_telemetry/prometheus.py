"""The endpoint: the latest value of every metric, one gauge each, for Prometheus to fetch."""

from __future__ import annotations

import re
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Gauge, start_http_server


class Endpoint:
    """Listens from the start on.

    Args:
        port: 0 for a free one; which it is stands in `port`.
        run: the label of every figure.

    Raises:
        OSError: the port is taken, or may not be used.
    """

    def __init__(self, host: str, port: int, run: str):
        self._registry, self._run = CollectorRegistry(), run
        self._gauges: dict[str, Gauge] = {}
        try:
            self._server, self._thread = start_http_server(port, host, self._registry)
        except OSError as error:
            raise OSError(f"Prometheus cannot fetch from {host}:{port}, telemetry.port ({error.strerror}; "
                          "--prometheus-port 0 takes a free one)") from error
        self.port = self._server.server_port

    def show(self, step: int, values: Mapping[str, float]) -> None:
        """Replace the figures of these names. What a rollout has no longer, such as a reason for drops, goes; an
        evaluation leaves everything else as it is: "rollout_id" is of the rollout that the other figures are of."""
        evaluation = all(name.startswith("eval/") for name in values)
        latest = values if evaluation else {**values, "rollout_id": step}
        shown = {gauge_name(name): (name, value) for name, value in latest.items()}
        if not evaluation:
            for gauge in [one for one in self._gauges if one not in shown and not one.startswith("miles_eval_")]:
                self._registry.unregister(self._gauges.pop(gauge))
        for gauge, (name, value) in shown.items():
            if gauge not in self._gauges:
                self._gauges[gauge] = Gauge(gauge, f"{name}, the latest", ["run"], registry=self._registry)
            self._gauges[gauge].labels(self._run).set(value)

    def close(self) -> None:
        """No longer listen."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


def gauge_name(name: str) -> str:
    """A metric's name as Prometheus allows it: train/lr-pg_0 is miles_train_lr_pg_0."""
    return "miles_" + re.sub(r"\W", "_", name, flags=re.ASCII)
