"""Random tiny checkpoints, written by transformers itself, and one torch thread unless a test asks for more."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import tokenizers as tk
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parent))  # sessions.py

VOCAB = 96

_COMMON = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 80, "max_position_embeddings": 640, "initializer_range": 0.3,
    "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_EXPERTS = {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 80}
CHOICES = {
    "dense": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": False},
    "tied": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "moe": {"model_type": "qwen3_moe", **_EXPERTS, "norm_topk_prob": True},
    "moe-plain": {"model_type": "qwen3_moe", **_EXPERTS, "norm_topk_prob": False, "mlp_only_layers": [0]},
    # Eight heads to a key, biases everywhere, a vocabulary that fills no vector.
    "llama": {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 16,
              "attention_bias": True, "mlp_bias": True, "vocab_size": VOCAB + 5, "tie_word_embeddings": False,
              "rope_parameters": _LLAMA3},
    "llama-tied": {"model_type": "llama", "num_attention_heads": 3, "num_key_value_heads": 1,
                   "tie_word_embeddings": True,
                   "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    "mistral": {"model_type": "mistral", "sliding_window": 8, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 160}},
    # A window in the upper layer alone, biases on q, k and v.
    "qwen2": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8,
              "max_window_layers": 1, "tie_word_embeddings": False},
}  # fmt: skip


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """kind -> (folder, transformers model)."""
    made = {}
    for kind in CHOICES:
        folder = tmp_path_factory.mktemp(kind)
        made[kind] = (folder, _build(kind, folder))
    return made


@pytest.fixture
def build():
    """(kind, folder, seed, changes to the config) -> transformers model, written to the folder."""
    return _build


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _build(kind: str, folder: Path, seed: int = 0, **changes) -> torch.nn.Module:
    """Write a checkpoint and return the transformers model (float32, eager attention) that it was written from."""
    options = {**_COMMON, **CHOICES[kind], **changes}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**options), dtype=torch.float32,
                                             attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):  # ones and zeros would hide one that is left out
                parameter.uniform_(0.5, 1.5)
    model.eval().save_pretrained(folder)
    return model


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte-level character: ids 0 to 95 spell bytes, some of them pieces of longer UTF-8 characters."""
    spellings = sorted(tk.pre_tokenizers.ByteLevel.alphabet())[:VOCAB]
    core = tk.Tokenizer(tk.models.BPE(vocab={spelling: index for index, spelling in enumerate(spellings)}, merges=[]))
    core.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = tk.decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False)
