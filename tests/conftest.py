"""Shared by all tests: a tiny random checkpoint of each family, its data, and run files that train it in a second."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # the shell started us in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest  # after the environment that torch reads

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "arithmetic"

CONSTANTS = dict(vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=8, max_position_embeddings=128, eos_token_id=258, pad_token_id=256,
                 tie_word_embeddings=True)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A folder with `qwen3/` and `qwen3_moe/` (random Hugging Face checkpoints), `train.jsonl` and `eval.jsonl`."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    models = {
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**CONSTANTS)),
        "qwen3_moe": Qwen3MoeForCausalLM(Qwen3MoeConfig(
            **CONSTANTS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True,
            decoder_sparse_step=1)),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        subprocess.run([sys.executable, EXAMPLE / "make_tokenizer.py", folder / name], check=True)
    for name, start, count in (("train", 10, 64), ("eval", 80, 8)):
        rows = [{"prompt": [{"role": "user", "content": f"{start + i % 9}+{start + i // 9}="}],
                 "label": str(2 * start + i % 9 + i // 9)} for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


RUN_FILE = """
plugins = ["{plugin}"]

[checkpoint]
hf_checkpoint = "{tiny}/{family}"

[rollout]
prompt_data = "{tiny}/train.jsonl"
input_key = "prompt"
label_key = "label"
apply_chat_template = true
num_rollout = 3
rollout_batch_size = 4
n_samples_per_prompt = 4
rollout_max_response_len = 6
rm_type = ["digits"]

[perf]
bf16 = false
use_dynamic_batch_size = true
max_tokens_per_gpu = 256

[optimizer]
lr = 1e-2
"""

DIGITS = '''
"""A reward that a random model can earn at once: the share of even token ids in its answer."""
from miles_core import hookimpl


class Digits:
    """Scores the parity of token ids."""

    @hookimpl("reward", name="digits")
    def digits(self, sample):
        ids = sample.tokens[-sample.response_length:]
        return float((ids % 2 == 0).mean())
'''


@pytest.fixture
def run_file(tiny, tmp_path):
    """(family="qwen3", **replacements) -> a run file in a folder of its own that trains for a second."""

    def write(family: str = "qwen3", **changes: str) -> Path:
        plugin = tmp_path / "digits.py"
        plugin.write_text(DIGITS)
        text = RUN_FILE.format(plugin=plugin, tiny=tiny, family=family)
        for old, new in changes.items():
            text = text.replace(old, new)
        path = tmp_path / "run.toml"
        path.write_text(text)
        return path

    return write
