"""Runs with Muon of tiny models, for the tests of every trainer that has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from miles_core.plugins.plan import Plan, prepare

SIZES = dict(vocab_size=264, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             head_dim=8, max_position_embeddings=128, eos_token_id=258, pad_token_id=256, tie_word_embeddings=False)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1)
RUN = ("--prompt-data", "x/no.jsonl", "--num-rollout", "3", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4",
       "--num-steps-per-rollout", "2", "--rollout-max-response-len", "41", "--no-bf16", "--use-dynamic-batch-size",
       "--max-tokens-per-gpu", "96", "--trainer-host", "process", "--advantage-estimator", "grpo",
       "--no-rewards-normalization", "--weight-decay", "0.1")  # fmt: skip


def planner(folder: Path, sizes: Mapping[str, Any], experts: Mapping[str, Any], *run: str) -> Callable[..., Plan]:
    """(*flags, kind=) -> the plan of a run of a random Qwen3, or of one with experts ("qwen3_moe")."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    for kind, more in {"qwen3": {}, "qwen3_moe": experts}.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **more)).save_pretrained(folder / kind)
    return lambda *flags, kind="qwen3": prepare(
        None, ["--hf-checkpoint", str(folder / kind), *RUN, *run, *map(str, flags)])


def gap(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
    """The largest difference of weights, of what Ranks.train answers."""
    return max(float(abs(ours["weights"][name] - value).max()) for name, value in theirs["weights"].items())
