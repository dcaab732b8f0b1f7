"""What the tests start a server with, and the weights that they send it."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("MILES_VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python")
MODEL = ROOT / "examples" / "arithmetic" / "tiny-qwen3"
"""Its heads have 32 channels: vLLM's attention on a CPU has no smaller ones."""
ARGS = ["enforce-eager", "kv-cache-memory-bytes=268435456", "max-num-seqs=32"]


def weights(version: int):
    """A complete stream of the model's tensors, with others for each version."""
    from safetensors.torch import load_file

    shrink = 1 - 0.1 * (version - 1)
    return [(name, tensor if "norm" in name else tensor * shrink)
            for name, tensor in load_file(MODEL / "model.safetensors").items()]
