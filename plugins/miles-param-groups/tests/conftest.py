"""Tiny checkpoints of a dense and a mixture model, and plans of runs on them."""

from __future__ import annotations

import pytest
import torch

from miles_core.plugins.plan import prepare

SIZES = dict(vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, max_position_embeddings=128, eos_token_id=258, pad_token_id=256,
             tie_word_embeddings=False, attn_implementation="eager")
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True,
               decoder_sparse_step=1)
KINDS = {"dense": ("qwen3", {}), "moe": ("qwen3_moe", EXPERTS), "tied": ("qwen3", {"tie_word_embeddings": True}),
         "biased": ("qwen2", {}), "deep": ("qwen3", {"num_hidden_layers": 4})}
RUN = ("--prompt-data", "x/no.jsonl", "--num-rollout", "4", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4",
       "--rollout-max-response-len", "41", "--no-bf16", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "256",
       "--trainer-host", "process", "--advantage-estimator", "grpo", "--lr", "1e-2")  # fmt: skip


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """kind -> a Hugging Face directory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folders = {}

    def make(kind="dense"):
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp(kind)
            torch.manual_seed(0)
            model_type, more = KINDS[kind]
            AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES | more)).save_pretrained(
                folders[kind])
        return folders[kind]

    return make


@pytest.fixture(scope="session")
def plan(checkpoint):
    """(*flags, kind) -> the plan of a run with plugin param-groups."""
    return lambda *flags, kind="dense": prepare(
        None, ["--hf-checkpoint", str(checkpoint(kind)), "--plugin", "param-groups", *RUN, *map(str, flags)])


@pytest.fixture
def trainer_of():
    """plan -> a trainer of this process, loaded."""
    from miles_core.build import trainer_part
    from miles_core.types import Rank

    started = []

    def make(planned):
        torch.set_num_threads(1)
        started.append(trainer_part(planned.selected, planned.config, Rank()))
        started[-1].load()
        return started[-1]

    yield make
    for trainer in started:
        trainer.close()
