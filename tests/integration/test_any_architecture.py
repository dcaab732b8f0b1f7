"""A Llama trains through its plugin and decodes through transformers; the loop does not know which path it is."""

import shutil

import torch
from miles_testing.forked import miles
from transformers import LlamaConfig, LlamaForCausalLM

from miles_core.record.events import read


def test_a_llama_trains_on_what_transformers_decodes(run_file, tiny, tmp_path):
    """Three rollouts, each sampled from the weights of the last: engine and trainer agree to rounding at every one."""
    folder = tmp_path / "llama"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, eos_token_id=258, pad_token_id=256,
    )).save_pretrained(folder)  # fmt: skip
    for path in (tiny / "qwen3").glob("*token*"):
        shutil.copy(path, folder)
    for path in (tiny / "qwen3").glob("*.jinja"):
        shutil.copy(path, folder)
    outcome = miles(["run", run_file(), "--no-live", "--run-dir", "run", "--hf-checkpoint", "llama",
                     "--rollout-max-response-len", "20"], tmp_path)  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert "engine local: llama through transformers" in outcome.out
    metrics = [event["metrics"] for event in read(tmp_path / "run" / "events.jsonl") if event["event"] == "metrics"]
    gaps = [one["train/train_rollout_logprob_abs_diff_max"] for one in metrics]
    assert len(gaps) == 3
    assert max(gaps) <= 1e-5
