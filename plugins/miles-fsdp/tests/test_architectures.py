"""Architectures without a map of weights for Megatron train, sampled by the engine local, and keep samples apart."""

from __future__ import annotations

import shutil

import pytest
from miles_testing import tiny_checkpoint, toy_run

SIZES = dict(vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=128, eos_token_id=258, pad_token_id=256, bos_token_id=257)
OTHERS = {"olmo2": {}, "phi3": {}, "smollm3": {}, "granite": {"logits_scaling": 2.0, "residual_multiplier": 0.5},
          "cohere2": {"logit_scale": 0.25, "head_dim": 8, "sliding_window": 16}, "stablelm": {},
          "starcoder2": {}, "nemotron": {},
          "gemma4_text": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16, "head_dim": 8,
                          "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
                          "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """model_type -> a directory with a tiny random model, tokenizer and prompts."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    def made(kind):
        folder = tmp_path_factory.mktemp(kind)
        shutil.copytree(tiny_checkpoint(), folder, dirs_exist_ok=True,
                        ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **OTHERS[kind]))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(4)
        model.save_pretrained(folder)
        return folder

    return made


@pytest.mark.parametrize("kind", [kind if kind == "olmo2" else pytest.param(kind, marks=pytest.mark.full)
                                  for kind in OTHERS])
def test_it_trains_what_the_engine_samples(kind, checkpoint):
    """Engine and trainer agree before each step, also on weights that the first step has made."""
    run = toy_run(["fsdp"], steps=2, checkpoint=checkpoint(kind), flags=["--rollout-max-response-len", "12"],
                  options={"perf.trainer": "fsdp", "rollout.rollout_temperature": 0.8})
    gaps = [one["train/train_rollout_logprob_abs_diff_max"] for one in run.metrics]
    print(kind, gaps, [one["train/grad_norm"] for one in run.metrics])
    assert len(gaps) == 2 and max(gaps) <= 1e-4
    assert all(one["train/grad_norm"] > 0 for one in run.metrics)
