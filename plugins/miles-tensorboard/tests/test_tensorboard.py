"""Event files are read back with TensorBoard's own reader."""

import subprocess
import sys

import pytest
from miles_tensorboard.event_files import folder_of
from miles_tensorboard.plugin import Tensorboard, TensorboardOptions
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def points(folder):
    """Metric -> [(step, value)] of a folder of event files."""
    reader = EventAccumulator(str(folder))
    reader.Reload()
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


@pytest.fixture
def start():
    """Starts of a run; each is a new instance of the plugin."""
    opened = []

    def make(**options):
        opened.append(Tensorboard(TensorboardOptions(**options)))
        return opened[-1]

    yield make
    for plugin in opened:
        plugin.finish()


def test_points_are_read_back(start, tmp_path):
    plugin = start()
    plugin.metrics(0, {"train/loss": 0.5, "rollout/raw_reward": 0.25}, tmp_path)
    plugin.metrics(1, {"train/loss": -1.0}, tmp_path)
    plugin.finish()
    assert points(tmp_path / "tensorboard") == {
        "train/loss": [(0, 0.5), (1, -1.0)], "rollout/raw_reward": [(0, 0.25)],
    }


def test_points_are_on_disk_before_the_run_ends(start, tmp_path):
    plugin = start()
    plugin.metrics(0, {"train/loss": 0.5}, tmp_path)
    assert points(tmp_path / "tensorboard") == {"train/loss": [(0, 0.5)]}


def test_evals_share_the_rollouts_step(start, tmp_path):
    plugin = start()
    plugin.metrics(3, {"train/loss": 0.5}, tmp_path)
    plugin.metrics(3, {"eval/heldout": 0.75}, tmp_path)
    plugin.finish()
    assert points(tmp_path / "tensorboard") == {"train/loss": [(3, 0.5)], "eval/heldout": [(3, 0.75)]}


def test_a_resumed_run_repeats_no_step(start, tmp_path):
    killed = start()
    for step in range(5):
        killed.metrics(step, {"train/loss": float(step)}, tmp_path)
    resumed = start()  # from a checkpoint after rollout 2
    for step in range(3, 7):
        resumed.metrics(step, {"train/loss": 10.0 + step}, tmp_path)
    resumed.finish()
    assert points(tmp_path / "tensorboard")["train/loss"] == [
        (0, 0.0), (1, 1.0), (2, 2.0), (3, 13.0), (4, 14.0), (5, 15.0), (6, 16.0),
    ]


def test_folders(tmp_path):
    run = tmp_path / "runs" / "demo"
    assert folder_of(run, None, None) == run / "tensorboard"
    assert folder_of(run, None, "a") == run / "tensorboard" / "a"
    assert folder_of(run, "/logs", None).as_posix() == "/logs/demo"
    assert folder_of(run, "/logs", "a").as_posix() == "/logs/a"


def test_the_project_folder_is_an_option(start, tmp_path):
    plugin = start(tb_project_name=str(tmp_path / "logs"), tb_experiment_name="first")
    plugin.metrics(0, {"train/loss": 0.5}, tmp_path / "run")
    plugin.finish()
    assert points(tmp_path / "logs" / "first") == {"train/loss": [(0, 0.5)]}
    assert not (tmp_path / "run").exists()


def test_switched_off(start, tmp_path):
    plugin = start(use_tensorboard=False)
    plugin.metrics(0, {"train/loss": 0.5}, tmp_path)
    plugin.finish()
    assert list(tmp_path.iterdir()) == []


def test_finish_without_metrics_and_twice(start):
    plugin = start()
    plugin.finish()
    plugin.finish()


def test_the_plugin_module_imports_nothing_heavy():
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; import miles_tensorboard.plugin;"
        "assert not {'torch', 'tensorboard'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
