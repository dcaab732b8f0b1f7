"""config.json of models that recipes train and no launch script names, and folders that hold no more than that."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from source import ROOT

QWEN3_06B = {"model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936,
             "tie_word_embeddings": True, "rope_theta": 1000000, "rms_norm_eps": 1e-06,
             "max_position_embeddings": 40960, "architectures": ["Qwen3ForCausalLM"]}
SMOLLM2 = {"model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9,
           "num_key_value_heads": 3, "head_dim": 64, "intermediate_size": 1536, "vocab_size": 49152,
           "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
           "rms_norm_eps": 1e-05, "max_position_embeddings": 8192, "architectures": ["LlamaForCausalLM"]}
CONFIGURATIONS = {"Qwen3-0.6B": QWEN3_06B, "smollm2-135m-instruct": SMOLLM2}


def without_weights(folder: Path, configuration: dict) -> None:
    """A checkpoint that plans with --plan-without-weights; its tokenizer is the examples'."""
    shutil.copytree(ROOT / "examples/arithmetic/tiny-qwen3", folder, ignore=lambda *_: ["model.safetensors"])
    (folder / "config.json").write_text(json.dumps(configuration))
