"""Event files are read back with TensorBoard's own reader."""

import subprocess
import sys
import time

import pytest
from miles_tensorboard.event_files import folder_of
from miles_tensorboard.plugin import Tensorboard, TensorboardOptions
from miles_testing.sample_inputs import canned_samples
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from miles_core.record.events import EventLog


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
        plugin.finish("completed")


def test_points_are_read_back(start, tmp_path):
    plugin = start()
    plugin.metrics(0, {"train/loss": 0.5, "rollout/raw_reward": 0.25}, tmp_path)
    plugin.metrics(1, {"train/loss": -1.0}, tmp_path)
    plugin.finish("completed")
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
    plugin.finish("completed")
    assert points(tmp_path / "tensorboard") == {"train/loss": [(3, 0.5)], "eval/heldout": [(3, 0.75)]}


def test_a_resumed_run_repeats_no_step(start, tmp_path):
    killed = start()
    for step in range(5):
        killed.metrics(step, {"train/loss": float(step)}, tmp_path)
    time.sleep(1.01 - time.time() % 1)  # TensorBoard reads files in the order of their names, which begin with seconds
    resumed = start()  # from a checkpoint after rollout 2
    for step in range(3, 7):
        resumed.metrics(step, {"train/loss": 10.0 + step}, tmp_path)
    resumed.finish("completed")
    assert points(tmp_path / "tensorboard")["train/loss"] == [
        (0, 0.0), (1, 1.0), (2, 2.0), (3, 13.0), (4, 14.0), (5, 15.0), (6, 16.0),
    ]


@pytest.mark.parametrize("again", [False, True])
def test_the_evaluation_of_the_checkpoint_stands_once(start, tmp_path, again):
    earlier = [(2, 0.25), (4, 0.75)]
    log = EventLog(tmp_path / "events.jsonl")
    log.run_start("p", {})
    first = start()
    for step, score in earlier:
        first.metrics(step, {"eval/held": score}, tmp_path)
        log.append("eval", step, metrics={"eval/held": score, "eval/held/lost": float("nan")})
    first.finish("completed")
    time.sleep(1.01 - time.time() % 1)
    log.run_start("p", {}, resumed_from=4)
    resumed = start()  # with more rollouts than before, at a rollout that is no multiple of --eval-interval or is one
    resumed.begin({"options": {}}, 4, tmp_path)
    for step, values in [(4, {"eval/held": 0.75})] * again + [(4, {"train/loss": 1.0}), (5, {"train/loss": 2.0})]:
        resumed.metrics(step, values, tmp_path)
    resumed.finish("completed")
    log.close()
    assert points(tmp_path / "tensorboard") == {"eval/held": earlier, "train/loss": [(4, 1.0), (5, 2.0)]}


def test_the_plan_and_samples_are_read_back_and_a_start_voids_what_is_to_come(start, tmp_path):
    samples = canned_samples()
    for resumed_from in (None, 1):
        plugin = start()
        plugin.begin({"options": {"rollout.num_rollout": 2, "judge.api_key": "hush-hush"}}, resumed_from, tmp_path)
        for step in range(resumed_from or 0, 2):
            plugin.metrics(step, {"train/loss": 0.5}, tmp_path)
            plugin.samples(step, None, samples, tmp_path)
        plugin.samples(2, "heldout", samples, tmp_path)
        plugin.finish("interrupted")
    reader = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"histograms": 0})
    reader.Reload()
    lengths = reader.Histograms("rollout/response_lengths")
    assert [event.step for event in lengths] == [0, 1] and lengths[0].histogram_value.num == len(samples)
    assert reader.Histograms("eval/heldout/rewards")[-1].step == 2
    [plan, again] = [event.tensor_proto.string_val[0].decode() for event in reader.Tensors("plan/text_summary")]
    assert "rollout.num_rollout | 2" in plan and again == plan
    assert "judge.api_key" in plan and "hush-hush" not in plan


def test_folders(tmp_path):
    run = tmp_path / "runs" / "demo"
    assert folder_of(run, None, None) == run / "tensorboard"
    assert folder_of(run, None, "a") == run / "tensorboard" / "a"
    assert folder_of(run, "/logs", None).as_posix() == "/logs/demo"
    assert folder_of(run, "/logs", "a").as_posix() == "/logs/a"


def test_the_project_folder_is_an_option(start, tmp_path):
    plugin = start(tb_project_name=str(tmp_path / "logs"), tb_experiment_name="first")
    plugin.metrics(0, {"train/loss": 0.5}, tmp_path / "run")
    plugin.finish("completed")
    assert points(tmp_path / "logs" / "first") == {"train/loss": [(0, 0.5)]}
    assert not (tmp_path / "run").exists()


def test_switched_off(start, tmp_path):
    plugin = start(use_tensorboard=False)
    plugin.begin({"options": {}}, None, tmp_path)
    plugin.metrics(0, {"train/loss": 0.5}, tmp_path)
    plugin.samples(0, None, canned_samples(), tmp_path)
    plugin.finish("completed")
    assert list(tmp_path.iterdir()) == []


def test_finish_without_metrics_and_twice(start):
    plugin = start()
    plugin.finish("completed")
    plugin.finish("completed")


def test_the_plugin_module_imports_nothing_heavy():
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; import miles_tensorboard.plugin;"
        "assert not {'torch', 'tensorboard'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
