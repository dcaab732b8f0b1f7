"""A reward model on a real SGLang server: what its head says of each answer is the reward that a run trains on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from miles_testing.forked import miles

from conftest import LAUNCHER, ROOT
from miles_core.record.events import read

pytestmark = [pytest.mark.slow, pytest.mark.integration]
POLICY = ROOT / "examples" / "arithmetic" / "tiny-qwen3"


@pytest.fixture
def classifier(tmp_path) -> Path:
    """A random Qwen3 with a head of one number, and the tokenizer of the example."""
    import torch
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    torch.manual_seed(3)
    folder = tmp_path / "classifier"
    Qwen3ForSequenceClassification(Qwen3Config(
        vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, eos_token_id=258, pad_token_id=256,
        num_labels=1, initializer_range=0.2, tie_word_embeddings=False)).save_pretrained(folder)
    subprocess.run([sys.executable, ROOT / "examples" / "arithmetic" / "make_tokenizer.py", folder], check=True)
    return folder


def test_a_run_trains_on_what_a_hosted_classifier_says(classifier, tmp_path):
    import torch
    from transformers import AutoTokenizer, Qwen3ForSequenceClassification

    (tmp_path / "servers.yaml").write_text(json.dumps({"sglang": [
        {"server_groups": [{"num_gpus": 1}]},
        {"name": "reward", "model_path": str(classifier), "update_weights": False,
         "options": {"server_command": LAUNCHER},
         "server_groups": [{"num_gpus": 2, "num_gpus_per_engine": 1,
                            "overrides": {"max_total_tokens": 4096, "dtype": "float32"}}]}]}))
    outcome = miles([
        "run", "--no-live", "--run-dir", "run", "--hf-checkpoint", POLICY, "--prompt-data",
        POLICY.parent / "train.jsonl", "--input-key", "prompt", "--label-key", "label", "--apply-chat-template",
        "--num-rollout", "3", "--engine", "local",
        "--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "8", "--no-bf16",
        "--threads", "1", "--rm-type", "reward_model", "--sglang-config", "servers.yaml"], tmp_path, timeout=450)
    assert outcome.code == 0, outcome.err
    steps = [event["metrics"] for event in read(tmp_path / "run/events.jsonl") if event["event"] == "metrics"]
    assert len(steps) == 3 and all(step["train/grad_norm"] > 0 for step in steps)

    rows = [json.loads(line) for line in (POLICY.parent / "train.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(classifier)
    model = Qwen3ForSequenceClassification.from_pretrained(classifier, dtype=torch.float32).eval()
    recorded = [json.loads(line) for path in (tmp_path / "run/samples").glob("rollout_*.jsonl")
                for line in path.read_text().splitlines()]
    assert len(recorded) == 48
    apart = []
    for sample in recorded:
        prompt = rows[sample["row"]]["prompt"]
        chat = [*(prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]),
                {"role": "assistant", "content": sample["response"]}]
        ids = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            apart.append(sample["reward"] - model(ids).logits[0, 0].item())
    assert max(map(abs, apart)) < 1e-4  # with the random bias that SGLang adds it is a hundred times that, or more
    assert all('"POST /classify HTTP/1.1" 200' in (tmp_path / f"run/logs/reward-{i}.log").read_text() for i in range(2))
