"""The engine and the trainer agree to the last bit: float32 on a CPU, dense models, sequences up to 256 tokens."""

import pytest

from miles_core.record.events import read
from miles_core.testing.forked import miles


def gaps(folder):
    metrics = [event["metrics"] for event in read(folder / "events.jsonl") if event["event"] == "metrics"]
    return [one["train/train_rollout_logprob_abs_diff_max"] for one in metrics]


@pytest.mark.parametrize("flags", [
    [], ["--rollout-temperature", "0.7"], ["--engine-max-batch", "5", "--max-tokens-per-gpu", "64"], ["--threads", "2"],
], ids=["plain", "temperature", "small batches", "two threads"])
def test_train_rollout_logprob_abs_diff_is_exactly_zero(run_file, tmp_path, flags):
    outcome = miles(["run", run_file(), "--no-live", "--run-dir", "run", "--rollout-max-response-len", "40", *flags],
                    tmp_path)
    assert outcome.code == 0, outcome.err
    assert gaps(tmp_path / "run") == [0.0, 0.0, 0.0]


def test_a_mixture_of_experts_agrees_to_rounding(run_file, tmp_path):
    outcome = miles(["run", run_file("qwen3_moe"), "--no-live", "--run-dir", "run", "--rollout-max-response-len", "40"],
                    tmp_path)
    assert outcome.code == 0, outcome.err
    assert max(gaps(tmp_path / "run")) <= 1e-5
