"""With one optimizer step per rollout no pass scores what the step computes itself, and nothing comes out otherwise."""

import pytest
from miles_testing.forked import miles

from miles_core.record.events import read

PASS = "--no-skip-actor-forward-only"
NOTE = "without a pass before it"
SPENT = ("perf/", "system/", "memory/")
"""Metrics of time and memory."""


def outcome_of(argv, folder):
    """What a run trained and reported: hashes and metrics of each rollout, less those of time."""
    outcome = miles(["run", *argv, "--no-live", "--run-dir", "run", "--debug-determinism"], folder)
    assert outcome.code == 0, outcome.err
    events = list(read(folder / "run" / "events.jsonl"))
    kept = [{key: event[key] for key in ("weights", "batch", "grad_norm")} for event in events
            if event["event"] == "hashes"]
    steps = [event["metrics"] for event in events if event["event"] == "metrics"]
    assert [step["perf/log_probs_time"] > 0 for step in steps] == [PASS in argv] * len(steps)
    assert PASS in argv or not any("perf/log_probs_tokens_per_gpu_per_sec" in step for step in steps)
    return kept, [{key: value for key, value in step.items() if not key.startswith(SPENT)} for step in steps]


@pytest.mark.parametrize("flags", [
    [], ["--trainer", "fsdp"], pytest.param(["--max-lag", 1], marks=pytest.mark.full),
    pytest.param(["--actor-num-gpus-per-node", 2, "--pipeline-model-parallel-size", 2], marks=pytest.mark.full)],
    ids=["megatron", "fsdp", "lag", "ranks"])
def test_a_run_without_the_pass_is_the_run_with_it(run_file, tmp_path, flags):
    both = []
    for folder, more in ((tmp_path / "with", [PASS]), (tmp_path / "without", [])):
        folder.mkdir()
        both.append(outcome_of([run_file(), "--num-rollout", "2", *map(str, flags), *more], folder))
    (hashes, metrics), without = both
    assert (hashes, metrics) == without
    assert len(hashes) == 2 and "train/train_rollout_logprob_abs_diff_fresh" in metrics[0]


@pytest.mark.parametrize(("flags", "leaves_out"), [
    ([], True), (["--trainer", "fsdp"], True), (["--trainer", "fsdp", "--kl-coef", "0.1"], False),
    (["--use-kl-loss"], True), (["--use-tis"], True), ([PASS], False), (["--use-rollout-logprobs"], False),
    (["--num-steps-per-rollout", "2"], False), (["--kl-coef", "0.1"], False), (["--skip-zero-advantages"], False),
    (["--use-tis", "--tis-batch-normalize"], False), (["--advantage-estimator", "ppo"], False),
])  # fmt: skip
def test_a_plan_says_whether_the_pass_is_left_out(run_file, tmp_path, flags, leaves_out):
    outcome = miles(["run", run_file(), "--plan", *flags], tmp_path)
    assert outcome.code == 0, outcome.err
    assert (NOTE in " ".join((outcome.out + outcome.err).split())) == leaves_out


READER = '''
from miles_core import hookimpl


class Reader:
    """Looks at the log-probs before the step."""
    {word}
    @hookimpl
    def train_step(self, proceed, access):
        return proceed()
'''


@pytest.mark.parametrize("word", ["", 'provides = ("needs-no-log-prob-pass",)'], ids=["unstated", "stated"])
def test_a_plugin_that_states_nothing_has_the_pass(run_file, tmp_path, word):
    (tmp_path / "reader.py").write_text(READER.replace("{word}", word))
    outcome = miles(["run", run_file(), "--plan", "--plugin", str(tmp_path / "reader.py")], tmp_path)
    assert outcome.code == 0, outcome.err
    assert (NOTE in " ".join((outcome.out + outcome.err).split())) == bool(word)
