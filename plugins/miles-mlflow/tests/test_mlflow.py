"""Runs in a folder of files, read back with MLflow's own client."""

import json
import threading
from pathlib import Path

import pytest
from miles_mlflow.plugin import Mlflow, MlflowOptions
from miles_testing.sample_inputs import canned_samples

from miles_core.config import RunConfig
from miles_core.errors import ConfigError

PLAN = {"name": "demo", "digest": "d1", "options": {"rollout.num_rollout": 5, "remote-rm.api_key": "sesame-open-42"}}


@pytest.fixture
def client(monkeypatch, tmp_path):
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "mlruns").mkdir()
    return MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())


def run(tmp_path, resumed_from, steps, status, **options):
    plugin = Mlflow(MlflowOptions(experiment_name="sums", tags={"kind": "test"}, system=False, sample_interval=1,
                                  **options))
    plugin.begin(PLAN, "a1b2c3d4", resumed_from, tmp_path)
    for step in steps:
        plugin.metrics(step, {"train/loss": step / 10, "eval/held": 0.75, "eval/held/length": 3.0,
                              "eval/held-pass@4": 0.5, "rollout/reward/rm#1, first": 0.25})
        plugin.samples(step, None, canned_samples())
    plugin.finish(status)


def test_a_run_is_read_back_and_a_resumed_one_goes_on_in_it(client, tmp_path):
    run(tmp_path, None, (0, 1), "interrupted")
    experiment = client.get_experiment_by_name("sums").experiment_id
    [found] = client.search_runs([experiment])
    assert found.info.run_name == "demo" and found.info.status == "KILLED"
    run(tmp_path, 2, (2,), "completed")
    [found] = client.search_runs([experiment])
    assert found.info.status == "FINISHED" and found.data.tags["kind"] == "test"
    assert found.data.params["rollout.num_rollout"] == "5"
    points = sorted((one.step, one.value) for one in client.get_metric_history(found.info.run_id, "train/loss"))
    assert points == [(0, 0.0), (1, 0.1), (2, 0.2)]
    names = {"eval/held", "eval/held.length", "eval/held-pass_at_4", "rollout/reward.rm_1_ first"}
    assert names <= set(found.data.metrics)
    names = [one.path for one in client.list_artifacts(found.info.run_id, "rollout/samples")]
    assert names == [f"rollout/samples/{step:07d}.json" for step in (0, 1, 2)]
    table = json.loads(Path(client.download_artifacts(found.info.run_id, names[-1])).read_text())
    assert table["columns"][:4] == ["step", "prompt", "answer", "reward"] and len(table["data"]) == 6
    assert "sesame" not in str(found.data.params) + str(client.list_artifacts(found.info.run_id))


def test_no_secret_is_in_the_run_directory(client, tmp_path):
    run(tmp_path, None, (0,), "completed")
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"sesame" in path.read_bytes()]


def test_system_figures_are_sampled(client, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    plugin = Mlflow(MlflowOptions())
    plugin.begin(PLAN, "a1b2c3d4", None, tmp_path)
    plugin.metrics(0, {"train/loss": 0.5})
    plugin.finish("completed")
    assert not [one for one in threading.enumerate() if "SystemMetrics" in one.name]


def test_a_password_in_the_address_is_refused():
    plugin = Mlflow(MlflowOptions(tracking_uri="https://me:secret@mlflow.example.org"))
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_PASSWORD"):
        plugin.check(RunConfig(), print)


def test_switched_off(tmp_path):
    plugin = Mlflow(MlflowOptions(use_mlflow=False))
    plugin.begin(PLAN, "a1b2", None, tmp_path)
    plugin.metrics(0, {"train/loss": 0.5})
    plugin.finish("completed")
    assert list(tmp_path.iterdir()) == []
