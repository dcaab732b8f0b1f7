"""An architecture trains through its plugin and decodes fast or through transformers; the loop cannot tell which."""

import shutil

import pytest
import torch
from miles_testing.forked import miles
from transformers import AutoConfig, AutoModelForCausalLM

from miles_core.record.events import read


@pytest.mark.parametrize(("kind", "way"), [
    ("glm4", "through transformers"),
    *(pytest.param(kind, "fast path", marks=pytest.mark.full) for kind in ("llama", "mistral", "qwen2"))])
def test_it_trains_on_what_the_engine_decodes(run_file, tiny, tmp_path, kind, way):
    """Three rollouts, each sampled from the weights of the last: engine and trainer agree to rounding at every one."""
    folder = tmp_path / kind
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(
        kind, vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, eos_token_id=258, pad_token_id=256,
    )).save_pretrained(folder)  # fmt: skip
    for path in (tiny / "qwen3").glob("*token*"):
        shutil.copy(path, folder)
    for path in (tiny / "qwen3").glob("*.jinja"):
        shutil.copy(path, folder)
    outcome = miles(["run", run_file(), "--no-live", "--run-dir", "run", "--hf-checkpoint", kind,
                     "--rollout-max-response-len", "20"], tmp_path)  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert f"engine local: {kind} {way}" in outcome.out
    metrics = [event["metrics"] for event in read(tmp_path / "run" / "events.jsonl") if event["event"] == "metrics"]
    gaps = [one["train/train_rollout_logprob_abs_diff_max"] for one in metrics]
    assert len(gaps) == 3
    assert max(gaps) <= 1e-5
