"""Trackers: what they are told, a name of the run that lasts, how it ended, and what happens when one fails."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
from miles_testing import toy_run

pytestmark = pytest.mark.integration

TRACKER = '''
import gc
import json
from pathlib import Path
from miles_core import hookimpl


class Tracker:
    name = "bad"

    def note(self, **said):
        with open("noted.jsonl", "a") as file:
            file.write(json.dumps(said) + "\\n")

    @hookimpl
    def begin(self, plan, run_id, resumed_from, run_dir):
        self.note(hook="begin", id=run_id, name=plan["name"], first=resumed_from, run=Path(run_dir).name,
                  rollouts=plan["options"]["rollout.num_rollout"])

    @hookimpl
    def metrics(self, rollout_id, values):
        self.note(hook="metrics", step=rollout_id, reward=values.get("rollout/raw_reward"),
                  frozen=gc.get_freeze_count())
        {metrics}

    @hookimpl
    def samples(self, rollout_id, dataset, samples):
        self.note(hook="samples", step=rollout_id, dataset=dataset, texts=[one.text for one in samples])
        {samples}

    @hookimpl
    def finish(self, status):
        self.note(hook="finish", status=status, frozen=gc.get_freeze_count())

    @hookimpl("reward", name="bad")
    def bad(self, sample):
        return 1 / 0
'''


def tracker(place, metrics="pass", samples="pass"):
    return place.plugin(TRACKER.replace("{metrics}", metrics).replace("{samples}", samples))


def noted(place, hook):
    path = place.path / "noted.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [one for one in map(json.loads, lines) if one["hook"] == hook]


def ended(place):
    """Statuses that the driver's instance, the rollout's and a trainer's in a thread of this process were told."""
    return [one["status"] for one in noted(place, "finish") if one["status"] != "closed"]


@pytest.mark.full
def test_a_tracker_knows_which_run_how_far_and_how_it_ended(place, quiet):
    flags = tracker(place)
    saves = ["--save", "ckpt", "--load", "ckpt"]

    def stop(number):
        before = len(noted(place, "samples"))

        def when_it_reports(process):
            while len(noted(place, "samples")) == before and process.is_alive():
                time.sleep(0.05)
            os.killpg(process.pid, number)
        return when_it_reports

    place.run(*flags, *saves, "--num-rollout", "1000", before=os.setsid, while_running=stop(signal.SIGKILL))
    assert noted(place, "metrics") and not noted(place, "finish"), "killed before it saved anything"
    place.run(*flags, *saves, "--num-rollout", "1000", before=os.setsid, while_running=stop(signal.SIGINT))
    assert ended(place) == ["interrupted"] * 2
    failed = place.run(*flags, *saves, "--num-rollout", "1", "--rm-type", "bad")
    assert failed.code == 1 and ended(place)[2:] == ["failed"] * 2
    assert place.run(*flags, *saves, "--num-rollout", "1").code == 0
    outcome = place.run(*flags, *saves, "--num-rollout", "2", "--eval-prompt-data", "held", place.tiny / "eval.jsonl",
                        "--eval-interval", "1")
    quiet(outcome)
    assert outcome.code == 0 and ended(place)[4:] == ["completed"] * 4
    begins = noted(place, "begin")
    assert len({one["id"] for one in begins}) == 1 and len(begins) == 5
    assert [one["first"] for one in begins] == [None, None, None, None, 1]
    assert {one["rollouts"] for one in begins} == {1000, 1, 2} and {one["run"] for one in begins} == {"a"}
    assert [one["step"] for one in noted(place, "samples")][-2:] == [1, 2]
    assert [one["dataset"] for one in noted(place, "samples")][-2:] == [None, "held"]
    assert all(noted(place, "samples")[-1]["texts"])


def test_garbage_collections_leave_out_what_the_start_has_loaded_until_the_run_ends(place):
    assert place.run(*tracker(place), "--num-rollout", "1").code == 0
    frozen = {hook: [one["frozen"] for one in noted(place, hook)] for hook in ("metrics", "finish")}
    assert min(frozen["metrics"]) > 10_000 and max(frozen["finish"]) < min(frozen["metrics"]) / 10, frozen


def test_a_tracker_that_fails_is_a_warning_or_the_end_of_a_strict_run(place):
    flags = tracker(place, metrics='raise ConnectionError("no route to the server")')
    outcome = place.run(*flags, "--num-rollout", "2")
    assert outcome.code == 0 and len(noted(place, "samples")) == 2
    assert all(word in outcome.out for word in ("no route to the server", "plugin bad", "hook metrics"))
    strict = place.run(*flags, "--num-rollout", "2", "--strict-trackers")
    assert strict.code == 1 and "no route to the server" in strict.err and len(noted(place, "samples")) == 2


LOGS = '''
from miles_core import hookimpl


class Logs:
    name = "logs"

    def __init__(self, log):
        self.log = log

    @hookimpl(name="mine")
    def prompt_source(self, config, tokenizer, read):
        from miles_core.stages.prompts import RowPrompts, rows_of

        self.log("source", 1)
        return RowPrompts(rows_of(config), read(config.rollout.prompt_data), tokenizer)

    @hookimpl(name="mine")
    async def generate(self, prompt, generation):
        from miles_core.stages.rollout import single_turn

        self.log("prompt", len(generation.tokenizer(prompt.text, add_special_tokens=False)["input_ids"]))
        return await single_turn(prompt, generation)

    @hookimpl("reward", name="mine")
    def score(self, sample):
        self.log("scored", sample.index)
        return float(sample.index)

    @hookimpl
    def filter_group(self, group):
        self.log("filter", 3)
        return group

    @hookimpl(name="mine")
    def advantage(self, batch):
        self.log("estimator", batch.rollout_id)
        return [sample.reward for sample in batch.samples]
'''


@pytest.mark.parametrize("host", ["thread", pytest.param("process", marks=pytest.mark.full)])
def test_numbers_of_every_kind_of_hook_reach_the_metrics(tmp_path, host):
    (tmp_path / "logs.py").write_text(LOGS)
    run = toy_run([tmp_path / "logs.py"], flags=["--trainer-host", host, "--num-steps-per-rollout", "2"], options={
        "rollout.prompt_source": "mine", "rollout.generate": "mine", "rollout.rm_type": ["mine"]})
    assert [one["logs/estimator"] for one in run.metrics] == [0, 1]
    assert [one["logs/filter"] for one in run.metrics] == [3, 3]
    assert all(one["logs/prompt"] > 0 and one["logs/scored"] == one["rollout/raw_reward"] for one in run.metrics)
    assert run.metrics[0]["logs/source"] == 1 and "logs/source" not in run.metrics[1]


KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.full
def test_trackers_of_services_take_part_together_and_go_on_after_a_resume(place, monkeypatch):
    """Offline, with a key on the command line; the second start does the third rollout."""
    for name in ("WANDB_API_KEY", "SWANLAB_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(place.path / "trackio"))
    flags = ["--use-wandb", "--wandb-mode", "offline", "--wandb-key", KEY, "--use-mlflow",
             "--plugin", "trackio", "swanlab", "--use-prometheus", "--prometheus-port", "0",
             "--telemetry.file", "{run_dir}/spans.jsonl", "--save", "ckpt", "--load", "ckpt", "--lr-decay-iters", "3"]
    for rollouts in ("2", "3"):
        outcome = place.run(*flags, "--num-rollout", rollouts)
        assert outcome.code == 0 and "not sent" not in outcome.out, outcome.err + outcome.out
    run = place.path / "runs/a"
    run_id = (run / "run_id").read_text().strip()
    assert {path.name.rpartition("-")[2] for path in run.glob("wandb/offline-run-*")} == {run_id}
    assert {path.name.rpartition("-")[2] for path in run.glob("swanlog/run-*")} == {run_id}
    [losses] = run.glob("mlruns/*/*/metrics/train/loss")
    assert [line.split()[2] for line in losses.read_text().splitlines()] == ["0", "1", "2"]
    spans = [json.loads(line) for line in (run / "spans.jsonl").read_text().splitlines()]
    assert [one["attributes"]["miles.rollout_id"] for one in spans if one["name"] == "rollout" and
            "miles.rollout_id" in one["attributes"]] == [0, 1, 2]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert not [one for one in events if one["event"] == "message" and one["level"] == "warning"]
    holding = [path for path in place.path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert not holding, holding
