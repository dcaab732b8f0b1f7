"""The endpoint is fetched over HTTP; spans are read back from a file, and by a collector of this process."""

import json
import socket
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from miles_telemetry.plugin import Telemetry, TelemetryOptions
from miles_telemetry.prometheus import Endpoint, gauge_name

PLAN = {"name": "demo", "digest": "d1", "options": {"rollout.num_rollout": 5}}
VALUES = {"train/loss": 0.5, "perf/rollout_time": 2.0, "perf/actor_train_time": 1.0, "perf/update_weights_time": 0.5}


def fetch(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
        lines = page.read().decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def test_prometheus_fetches_the_latest_figures():
    endpoint = Endpoint("127.0.0.1", 0, "demo")
    try:
        endpoint.show(3, {"eval/held": 0.75})
        endpoint.show(3, {"train/loss": 0.5, "rollout/dynamic_filter/drop_dull": 12.0})
        endpoint.show(4, {"eval/other": 0.5})
        found = fetch(endpoint.port)
        assert found['miles_rollout_dynamic_filter_drop_dull{run="demo"}'] == 12
        assert found['miles_rollout_id{run="demo"}'] == 3, "an evaluation's step is not that of the figures beside it"
        endpoint.show(4, {"train/loss": 0.25})
        assert fetch(endpoint.port) == {'miles_train_loss{run="demo"}': 0.25, 'miles_rollout_id{run="demo"}': 4,
                                        'miles_eval_held{run="demo"}': 0.75, 'miles_eval_other{run="demo"}': 0.5}
    finally:
        endpoint.close()
    with pytest.raises(OSError):
        fetch(endpoint.port)


def test_a_port_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"127.0.0.1:{port}"):
            Endpoint("127.0.0.1", port, "demo")


def test_a_free_port_is_named_in_the_run_directory_while_the_run_lives(tmp_path):
    plugin, file = Telemetry(TelemetryOptions(port=0)), tmp_path / "prometheus.json"
    plugin.begin(PLAN, "a1b2", None, tmp_path)
    plugin.metrics(4, {"train/loss": 0.25})
    [target] = json.loads(file.read_text())
    [address] = target["targets"]
    assert fetch(int(address.removeprefix("127.0.0.1:")))['miles_train_loss{run="demo"}'] == 0.25
    plugin.finish("completed")
    assert not file.exists()


def test_names_are_those_that_prometheus_allows():
    assert gauge_name("eval/sums/pass@4") == "miles_eval_sums_pass_4"


def spans_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_stages_are_spans_one_after_another(tmp_path):
    plugin = Telemetry(TelemetryOptions(use_prometheus=False, file="{run_dir}/spans.jsonl"))
    plugin.begin(PLAN, "a1b2", 3, tmp_path)
    plugin.metrics(3, VALUES)
    plugin.metrics(3, {"eval/held": 0.75})
    plugin.finish("failed")
    spans = spans_of(tmp_path / "spans.jsonl")
    by_name = {one["name"]: one for one in spans}
    assert [one["name"] for one in spans] == ["rollout", "train", "sync", "rollout", "evaluation", "run"]
    assert len({one["context"]["trace_id"] for one in spans}) == 1
    whole, run = spans[3], by_name["run"]
    assert whole["parent_id"] == run["context"]["span_id"] and whole["attributes"]["train/loss"] == 0.5
    assert whole["attributes"]["miles.rollout_id"] == 3 and run["attributes"]["miles.first_rollout"] == 3
    assert [one["start_time"] for one in spans[1:3]] == [spans[0]["end_time"], spans[1]["end_time"]]
    assert spans[0]["start_time"] == whole["start_time"] and by_name["sync"]["end_time"] <= whole["end_time"]
    assert run["status"]["status_code"] == "ERROR" and run["resource"]["attributes"]["service.instance.id"] == "a1b2"


def test_a_collector_gets_the_spans(tmp_path):
    got = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    plugin = Telemetry(TelemetryOptions(use_prometheus=False,
                                        endpoint=f"http://127.0.0.1:{server.server_port}/v1/traces"))
    plugin.begin(PLAN, "a1b2", None, tmp_path)
    plugin.metrics(0, VALUES)
    plugin.finish("completed")
    server.shutdown()
    server.server_close()
    assert {path for path, _ in got} == {"/v1/traces"}
    assert all(word in b"".join(body for _, body in got) for word in (b"rollout", b"sync", b"miles.plan"))
