"""Architectures without a map of weights for Megatron train, sampled by the engine local, and keep samples apart."""

from __future__ import annotations

import shutil

import pytest
from miles_testing import tiny_checkpoint, toy_run
from miles_testing.sample_inputs import canned_samples

from miles_core.columns import Columns

SIZES = dict(vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=128, eos_token_id=258, pad_token_id=256, bos_token_id=257)
OTHERS = {"olmo2": {}, "phi3": {}, "smollm3": {}, "granite": {"logits_scaling": 2.0, "residual_multiplier": 0.5},
          "cohere2": {"logit_scale": 0.25, "head_dim": 8, "sliding_window": 16}, "stablelm": {},
          "starcoder2": {}, "nemotron": {},
          "llama4_text": {"intermediate_size_mlp": 48, "head_dim": 8, "num_local_experts": 4},
          "gemma4_text": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16, "head_dim": 8,
                          "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
                          "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0}}
FOUR = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16}
SPARSE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
          "v_head_dim": 8}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 16}
PER_LAYER = {**FOUR, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 264, "num_kv_shared_layers": 2}
UNMAPPED = {
    "deepseek_v4": {**SPARSE, "num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 16,
                    "o_lora_rank": 8, "o_groups": 2, "qk_rope_head_dim": 8, "sliding_window": 8, "index_topk": 2,
                    "index_n_heads": 16, "index_head_dim": 16, "hc_sinkhorn_iters": 4,
                    "mlp_layer_types": ["hash_moe", "moe"] * 2,
                    "layer_types": ["sliding_attention", "heavily_compressed_attention",
                                    *2 * ["compressed_sparse_attention"]],
                    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "gemma3n_text": {**PER_LAYER, "head_dim": 8, "laurel_rank": 8,
                     "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0]},
    "gemma4_text, E2B": {**PER_LAYER, "head_dim": 8, "global_head_dim": 16, "final_logit_softcapping": 30.0},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64, "head_dim": 8, "lm_head_multiplier": 0.5},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"], "num_local_experts": 4,
                         "num_experts_per_tok": 2, "shared_intermediate_size": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
              "num_experts": 4, "mamba_d_state": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}, "minimax": {},
    "kimi_linear": {**SPARSE, **LATENT, "q_lora_rank": None, "linear_head_dim": 8, "linear_num_heads": 2,
                    "num_experts": 4, "first_k_dense_replace": 1},
    "longcat_flash": {**LATENT, "num_layers": 2, "num_hidden_layers": 4, "ffn_hidden_size": 48, "head_dim": 8,
                      "expert_ffn_hidden_size": 16, "n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1},
    "deepseek_v32": {**SPARSE, **LATENT, "n_group": 2, "topk_group": 1, "index_topk": 4, "index_n_heads": 8,
                     "index_head_dim": 16, "first_k_dense_replace": 1, "num_hidden_layers": 3},
    "mimo_v2_flash": {**SPARSE, "head_dim": 16, "v_head_dim": 8, "swa_head_dim": 16, "swa_v_head_dim": 8,
                      "num_local_experts": 4, "sliding_window": 8},
    "hunyuan_v1_dense": {"head_dim": 8}, "hunyuan_v1_moe": {"head_dim": 8}, "apertus": {}, "arcee": {}, "doge": {}}
"""Most of which the trainer for Megatron does not build."""
OTHERS |= UNMAPPED
ATTENTION = {"mimo_v2_flash": "eager"}
"""Where the packed one refuses: sinks."""
GATE = {"olmo2", "deepseek_v4"}


class Alone:
    """The ranks of a trainer of one, without a process group."""

    device = "cpu"

    def gathered(self, value):
        return [value]


def built(kind):
    """A tiny random model; numbers of experts in its tables are those of experts that there are."""
    import torch
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    if kind.partition(",")[0] not in CONFIG_MAPPING:
        pytest.skip("this release of transformers does not know it")
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind.partition(",")[0], **{**SIZES, **OTHERS[kind]})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
        for buffer in model.buffers():
            if buffer.dtype == torch.int64 and buffer.dim() == 2:
                buffer.random_(0, 4)
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A key of OTHERS -> a directory with a tiny random model, tokenizer and prompts."""
    def made(kind):
        folder = tmp_path_factory.mktemp(kind.partition(",")[0])
        shutil.copytree(tiny_checkpoint(), folder, dirs_exist_ok=True,
                        ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
        built(kind).save_pretrained(folder)
        return folder

    return made


@pytest.mark.parametrize("kind", [kind if kind in GATE else pytest.param(kind, marks=pytest.mark.full)
                                  for kind in OTHERS])
def test_it_trains_what_the_engine_samples(kind, checkpoint):
    """Engine and trainer agree before each step, also on weights that the first step has made."""
    flags = ["--rollout-max-response-len", "12", "--attn-implementation", ATTENTION.get(kind, "packed")]
    run = toy_run(["fsdp"], steps=2, checkpoint=checkpoint(kind), flags=flags,
                  options={"perf.trainer": "fsdp", "rollout.rollout_temperature": 0.8})
    gaps = [one["train/train_rollout_logprob_abs_diff_max"] for one in run.metrics]
    print(kind, gaps, [one["train/grad_norm"] for one in run.metrics])
    assert len(gaps) == 2 and max(gaps) <= 1e-4
    assert all(one["train/grad_norm"] > 0 for one in run.metrics)


@pytest.mark.parametrize("kind", [kind if kind in list(UNMAPPED)[:3] else pytest.param(kind, marks=pytest.mark.full)
                                  for kind in UNMAPPED])
def test_gradients_are_those_of_samples_one_by_one(kind):
    """Whether samples are packed or side by side: none reaches another, and what fills up reaches nothing."""
    import torch
    from miles_fsdp.microbatch import MicroBatch
    from miles_fsdp.models import _two_samples
    from miles_fsdp.module import CausalModule, keep_apart
    from miles_fsdp.scored import Temperature

    columns, cpu = Columns(), torch.device("cpu")
    ours, samples = CausalModule(built(kind), Temperature(0.7, 4), ATTENTION.get(kind, "packed")), canned_samples()[:3]
    keep_apart(ours, MicroBatch(columns, _two_samples(columns, ours.reach), cpu), Alone())
    results = []
    for batches in ([samples], [[one] for one in samples]):
        ours.zero_grad()
        for batch in batches:
            ours(MicroBatch(columns, batch, cpu), lambda scored: scored.log_probs().sum()).backward()
        results.append({name: one.grad.clone() for name, one in ours.named_parameters() if one.grad is not None})
    together, alone = results
    assert together.keys() == alone.keys() and len(alone) > 10
    for name, gradient in alone.items():
        assert (together[name] - gradient).norm() <= 2e-5 * gradient.norm() + 1e-6, name
