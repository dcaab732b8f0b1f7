"""A whole run whose engine is a real vLLM server."""

from __future__ import annotations

import psutil
import pytest
from miles_testing.forked import miles
from small_server import ARGS, MODEL, PYTHON, ROOT

from miles_core.record.events import read

pytestmark = [pytest.mark.slow, pytest.mark.integration]

RUN = f"""
plugins = ["grpo", "math", "vllm"]

[checkpoint]
hf_checkpoint = "{MODEL}"
run_dir = "run"

[rollout]
engine = "vllm"
prompt_data = "{ROOT}/examples/arithmetic/train.jsonl"
input_key = "prompt"
label_key = "label"
apply_chat_template = true
rm_type = ["math"]
num_rollout = 3
rollout_batch_size = 8
n_samples_per_prompt = 4
rollout_max_response_len = 8
rollout_max_context_len = 256

[perf]
bf16 = false

[optimizer]
lr = 1e-3

[vllm]
python = "{PYTHON}"
args = {ARGS}
"""


def test_a_run_trains_on_what_a_real_server_draws(tmp_path):
    """Log-probs of engine and trainer differ by the rounding of float32, though each rollout changes the weights; each
    is followed by a sync of every tensor, and the run leaves no server behind."""
    (tmp_path / "run.toml").write_text(RUN)
    outcome = miles(["run", "run.toml", "--no-live"], tmp_path, timeout=600)
    assert outcome.code == 0, outcome.err
    events = list(read(tmp_path / "run/events.jsonl"))
    steps = [event["metrics"] for event in events if event["event"] == "metrics"]
    assert len(steps) == 3 and all(step["train/grad_norm"] > 0 for step in steps)
    assert max(step["train/train_rollout_logprob_abs_diff_max"] for step in steps) <= 1e-4
    syncs = [event for event in events if event["event"] == "weight_sync"]
    assert [event["version"] for event in syncs] == [1, 2, 3, 4] and {event["tensors"] for event in syncs} == {46}
    assert not [one for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(one.info["cmdline"])]
