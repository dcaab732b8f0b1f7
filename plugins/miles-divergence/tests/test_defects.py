"""A defect in one trainer is found in the module that has it."""

import pytest

pytestmark = pytest.mark.xdist_group("divergence")  # one worker: sound sides are computed once

GATE = ("samples-seen", "q-norm-left-out", "experts-swapped", "gradient-of-norm")
MOE, LATENT = "Qwen3-MoE", "DeepSeek-V3"

DEFECTS = {
    # name: (model, trainer that has it, modules that may be named)
    "rope-base": ("Qwen3", "fsdp", ["model.layers.0.self_attn"]),
    "rope-unscaled": ("Qwen3", "fsdp", ["model.layers.0.self_attn"]),
    "positions-off-by-one": ("Qwen3", "fsdp", ["model.layers.0.self_attn"]),
    "samples-seen": ("Qwen3", "fsdp", ["model.layers.2.self_attn"]),
    "window-left-out": ("Qwen2", "fsdp", ["model.layers.3.self_attn"]),
    "window-one-less": ("Qwen2", "fsdp", ["model.layers.2.self_attn"]),
    "megatron-window": ("Qwen2", "megatron", ["model.layers.2.self_attn"]),
    "attention-scale": ("Qwen3", "fsdp", ["model.layers.1.self_attn"]),
    "megatron-attention-scale": ("Qwen3", "megatron", ["model.layers.0.self_attn"]),
    "residual-scale": ("Granite", "fsdp", ["model.layers.1"]),
    "embedding-scale": ("Granite", "fsdp", ["model.embed_tokens"]),
    "logit-scale": ("Granite", "fsdp", ["lm_head"]),
    "norm-epsilon": ("Qwen3", "fsdp", ["model.layers.2.input_layernorm"]),
    "megatron-norm-epsilon": ("Qwen3", "megatron", ["model.layers.1.self_attn.q_norm"]),
    "q-norm-left-out": ("Qwen3", "fsdp", ["model.layers.1.self_attn.q_norm"]),
    "megatron-k-norm-left-out": ("Qwen3", "megatron", ["model.layers.3.self_attn.k_norm"]),
    "latent-norm-left-out": (LATENT, "fsdp", ["model.layers.1.self_attn.kv_a_layernorm"]),
    "final-norm-stale": ("Qwen3", "fsdp", ["model.norm"]),
    "projection-transposed": ("Qwen3", "fsdp", ["model.layers.2.self_attn.k_proj"]),
    "q-bias-missing": ("Qwen2", "fsdp", ["model.layers.1.self_attn.q_proj"]),
    "megatron-down-bias-missing": ("Llama", "megatron", ["model.layers.2.mlp.down_proj"]),
    "megatron-gate-and-up-swapped": ("Qwen3", "megatron", ["model.layers.0.mlp.gate_proj"]),
    "key-heads-swapped": ("Qwen3", "fsdp", ["model.layers.3.self_attn.k_proj"]),
    "projection-stale": ("Qwen3", "fsdp", ["model.layers.2.self_attn.o_proj"]),
    "activation": ("Qwen3", "fsdp", ["model.layers.3.mlp"]),
    "embedding-stale": ("Qwen3", "fsdp", ["model.embed_tokens"]),
    "tied-head-stale": ("Llama", "megatron", ["lm_head"]),
    "experts-swapped": (MOE, "fsdp", ["model.layers.1.mlp.experts.2", "model.layers.1.mlp.experts.5"]),
    "expert-stale": (MOE, "fsdp", ["model.layers.2.mlp.experts.3"]),
    "megatron-experts-swapped": (MOE, "megatron", ["model.layers.3.mlp.experts.0", "model.layers.3.mlp.experts.6"]),
    "router-not-normalised": (MOE, "fsdp", ["model.layers.2.mlp.gate"]),
    "router-one-less": (MOE, "fsdp", ["model.layers.1.mlp.gate"]),
    "router-bias-lost": (LATENT, "fsdp", ["model.layers.2.mlp.gate"]),
    "router-scale": (LATENT, "fsdp", ["model.layers.1.mlp.gate"]),
    "router-rounded": (MOE, "fsdp", ["model.layers.2.mlp.gate"]),
    "shared-expert-lost": (LATENT, "fsdp", ["model.layers.3.mlp.shared_experts.down_proj"]),
    "gradient-of-norm": ("Qwen3", "fsdp", ["model.layers.2.post_attention_layernorm"]),
    "gradient-of-values": ("Qwen3", "fsdp", ["model.layers.1.self_attn.o_proj"]),
}


@pytest.mark.parametrize("defect", [
    name if name in GATE else pytest.param(name, marks=pytest.mark.full) for name in DEFECTS])
def test_a_defect_is_found_in_its_module(sides, defect):
    model, trainer, modules = DEFECTS[defect]
    comparison = sides.planted(model, trainer, defect)
    assert comparison.modules == modules, (comparison.first, comparison.reason)
    assert not comparison.same and comparison.exit_code == 1


@pytest.mark.parametrize("defect", ["samples-seen", pytest.param("positions-off-by-one", marks=pytest.mark.full)])
def test_the_first_token_that_differs_is_named(sides, defect):
    """Micro-batches are packed by length: a sample is seen by those that lie behind it."""
    first = sides.planted("Qwen3", "fsdp", defect).first
    assert first.what == "input" and first.name.endswith("self_attn.o_proj")
    length = sides.batch.samples[first.sample].length
    assert 0 <= first.token < length and 0 < first.differing <= first.of == sum(
        sample.length for sample in sides.batch.samples)


@pytest.mark.full
def test_weights_that_differ_are_named_as_well(sides):
    """Of the defect in a weight it says so; where the computation is at fault all weights are equal."""
    assert sides.planted("Qwen3", "fsdp", "projection-stale").weights == ["model.layers.2.self_attn.o_proj.weight"]
    assert sides.planted("Qwen3", "fsdp", "rope-base").weights == []
