"""Runs that the library writes offline, read back from its own files."""

import pytest
from miles_swanlab.plugin import Swanlab, SwanlabOptions, has_key
from miles_testing.sample_inputs import canned_samples

from miles_core.config import RunConfig

PLAN = {"name": "demo", "digest": "d1", "options": {"rollout.num_rollout": 5, "remote-rm.api_key": "sesame-open-42"}}


@pytest.fixture(autouse=True)
def nobody(monkeypatch, tmp_path):
    """No key of the machine's."""
    monkeypatch.delenv("SWANLAB_API_KEY", raising=False)
    monkeypatch.setenv("SWANLAB_SAVE_DIR", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def run(tmp_path, resumed_from, steps):
    plugin = Swanlab(SwanlabOptions(project="sums", group="g", tags=["one"], system=False, sample_interval=1))
    plugin.begin(PLAN, "a1b2c3d4", resumed_from, tmp_path)
    for step in steps:
        plugin.metrics(step, {"train/loss": step / 10, "eval/held": 0.75})
    plugin.samples(steps[0], None, canned_samples())
    plugin.finish("completed")


def test_a_run_without_a_key_is_read_back_from_its_folder(tmp_path):
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    run(tmp_path, None, (0, 1))
    [path] = tmp_path.glob("swanlog/run-*-a1b2c3d4/*.swanlab")
    reader = DataStoreReader()
    reader.open(path)
    text = b"\n".join(reader).decode("utf-8", "replace")
    reader.close()
    assert all(word in text for word in ("train/loss", "eval/held", "rollout/samples"))
    config = (path.parent / "files" / "config.yaml").read_text()
    assert "rollout.num_rollout" in config and "sesame" not in config


def test_starts_of_one_run_have_one_id(tmp_path):
    run(tmp_path / "one", None, (0, 1))
    run(tmp_path / "two", 1, (1, 2))
    assert [path.name[-8:] for path in sorted(tmp_path.glob("*/swanlog/run-*"))] == ["a1b2c3d4"] * 2


def test_a_plan_says_where_a_run_without_a_key_goes(monkeypatch):
    notes = []
    Swanlab(SwanlabOptions()).check(RunConfig(), notes.append)
    assert len(notes) == 1 and "SWANLAB_API_KEY" in notes[0]
    monkeypatch.setenv("SWANLAB_API_KEY", "x" * 20)
    assert has_key()
    Swanlab(SwanlabOptions()).check(RunConfig(), notes.append)
    assert len(notes) == 1
