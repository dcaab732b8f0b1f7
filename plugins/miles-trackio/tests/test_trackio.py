"""Runs in a database of this machine, read back with Trackio's own functions."""

import sys

import pytest
from miles_testing.sample_inputs import canned_samples
from miles_trackio.plugin import Trackio, TrackioOptions

from miles_core.config import RunConfig
from miles_core.errors import ConfigError

PLAN = {"name": "demo", "digest": "d1", "options": {"rollout.num_rollout": 5, "remote-rm.api_key": "sesame-open-42"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Trackio reads where databases lie when it is imported: one folder for the tests of this file."""
    assert "trackio" not in sys.modules
    return tmp_path_factory.mktemp("trackio")


def run(folder, project, resumed_from, steps):
    plugin = Trackio(TrackioOptions(project=project, group="g", folder=str(folder), system=False, sample_interval=1))
    plugin.begin(PLAN, "a1b2c3d4e5", resumed_from, folder)
    for step in steps:
        plugin.metrics(step, {"train/loss": step / 10, "eval/held": 0.75})
        plugin.samples(step, None, canned_samples())
    plugin.finish("completed")


def test_a_run_is_read_back_and_a_resumed_one_goes_on_in_it(folder):
    run(folder, "sums", None, (0, 1))
    run(folder, "sums", 2, (2,))
    from trackio.sqlite_storage import SQLiteStorage

    assert SQLiteStorage.get_runs("sums") == ["demo-a1b2c3d4"] and (folder / "sums.db").is_file()
    logs = SQLiteStorage.get_logs("sums", "demo-a1b2c3d4")
    assert [(one["step"], one["train/loss"]) for one in logs if "train/loss" in one] == [(0, 0.0), (1, 0.1), (2, 0.2)]
    tables = [one["rollout/samples"] for one in logs if "rollout/samples" in one]
    assert len(tables) == 3 and len(tables[0]["_value"]) == len(canned_samples())
    config = SQLiteStorage.get_run_config("sums", "demo-a1b2c3d4")
    assert config["rollout.num_rollout"] == 5 and config["run_id"] == "a1b2c3d4e5" and "sesame" not in str(config)


def test_a_token_in_the_address_is_refused():
    for url in ("https://me:secret@host", "https://host/?write_token=secret"):
        with pytest.raises(ConfigError, match="TRACKIO_WRITE_TOKEN"):
            Trackio(TrackioOptions(server_url=url)).check(RunConfig(), print)
