"""Evaluations on an engine of their own, in whole runs: the figures of those in the loop, also after a kill."""

import signal

import pytest
from miles_testing.forked import miles

from miles_core.record.events import read
from miles_core.record.samples import read_samples, sample_file

DATASETS = """
[eval]
eval_interval = 2

[[eval.datasets]]
name = "drawn"
path = "{tiny}/eval.jsonl"
n_samples = 4
temperature = 0.7

[[eval.datasets]]
name = "greedy"
path = "{tiny}/eval.jsonl@[0:4]"
temperature = 0.0

[perf]"""

KILLS = '''
"""Kills the run once, amid the evaluation of the weights that rollout 4 samples from."""
import os
import signal
from pathlib import Path

from miles_core import hookimpl


class Kills:
    """Dies once."""

    @hookimpl
    def generate_response(self, sample, response):
        if sample.prompt.stream == "eval/greedy" and response.versions[0] == 5 and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return sample
'''


def go(path, folder, *more, code=0):
    """The events of a run in the folder, those that a later start has superseded left out."""
    outcome = miles(["run", path, "--no-live", "--run-dir", folder, "--save", folder / "checkpoints", "--save-interval",
                     "3", "--load", folder / "checkpoints", "--save-hf", folder / "hf", "--num-rollout", "6", *more],
                    folder.parent)
    assert outcome.code == code, outcome.err
    return list(read(folder / "events.jsonl"))


def evals(events):
    return [(event["rollout_id"], event["metrics"]) for event in events if event["event"] == "eval"]


def answers(folder, name, rollout_id):
    return [(one["token_ids"], one["reward"]) for one in read_samples(sample_file(folder, f"eval_{name}", rollout_id))]


@pytest.mark.parametrize("max_lag", ["0", pytest.param("2", marks=pytest.mark.full)])
def test_the_figures_and_the_training_are_those_of_a_run_that_evaluates_itself(run_file, tiny, tmp_path, max_lag):
    path = run_file(**{"\n[perf]": DATASETS.format(tiny=tiny)})
    alone = go(path, tmp_path / "a", "--max-lag", max_lag)
    beside = go(path, tmp_path / "b", "--max-lag", max_lag, "--plugin", "dedicated-eval")
    assert [event["rollout_id"] for event in beside if event["event"] == "eval_weights"] == [0, 2, 4, 6]
    if max_lag == "0":  # else what is sampled depends on when
        assert evals(beside) == evals(alone) and len(evals(alone)) == 8
        for name in ("drawn", "greedy"):
            assert all(answers(tmp_path / "a", name, n) == answers(tmp_path / "b", name, n) for n in (0, 2, 4, 6))
        weights = [(tmp_path / run / "hf/model.safetensors").read_bytes() for run in "ab"]
        assert weights[0] == weights[1]
    else:
        assert [rollout_id for rollout_id, _ in evals(beside)] == [rollout_id for rollout_id, _ in evals(alone)]


def test_a_run_that_was_killed_amid_an_evaluation_misses_none(run_file, tiny, tmp_path):
    path = run_file(**{"\n[perf]": DATASETS.format(tiny=tiny)})
    (tmp_path / "kills.py").write_text(KILLS)
    whole = go(path, tmp_path / "a")
    more = ("--plugin", "dedicated-eval", "--plugin", tmp_path / "kills.py")
    first = go(path, tmp_path / "b", *more, code=-signal.SIGKILL)
    assert max(rollout_id for rollout_id, _ in evals(first)) <= 4 and (tmp_path / "killed").exists()
    assert evals(go(path, tmp_path / "b", *more)) == evals(whole)
