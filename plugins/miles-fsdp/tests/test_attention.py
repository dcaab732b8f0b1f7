"""The packed attention sees what transformers' masks let it see, and its gradient is theirs."""

from __future__ import annotations

import pytest
import torch
from miles_fsdp.attention import NAME, Boundaries, _one_by_one, flash
from miles_fsdp.microbatch import MicroBatch
from miles_fsdp.module import CausalModule
from miles_fsdp.scored import Temperature
from miles_testing.sample_inputs import canned_samples

from miles_core.columns import Columns
from miles_core.errors import ConfigError

CPU = torch.device("cpu")
SIZES = dict(vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=128)
KINDS = {"qwen3": {"head_dim": 16}, "cohere2": {"sliding_window": 3, "head_dim": 8},
         "qwen2_moe": {"use_sliding_window": True, "sliding_window": 2, "max_window_layers": 2, "num_experts": 4,
                       "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
         "mistral": {"sliding_window": 2}, "granite": {"attention_multiplier": 0.3}, "phi3": {"pad_token_id": 0},
         "deepseek_v3": {"n_group": 1, "topk_group": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
                         "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
                         "v_head_dim": 6, "moe_intermediate_size": 16, "num_key_value_heads": 4}}


def scored(kind, attention):
    """Log-probs of packed samples, and the gradient of their sum by every parameter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES | KINDS[kind])
    model = AutoModelForCausalLM.from_config(config, attn_implementation=None if attention == "packed" else attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # so large that another mask shows
                parameter.mul_(4)
    module = CausalModule(model.eval(), Temperature(1.0, 64), attention)
    assert (module.model.config._attn_implementation == NAME) is (attention == "packed")
    values = module(MicroBatch(Columns(), canned_samples(), CPU), lambda rows: rows.log_probs())
    values.sum().backward()
    return values.detach(), {name: one.grad for name, one in module.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_attention_that_masks_describe(kind):
    """Windows, groups of heads, scales, and values of another size than keys."""
    (values, gradients), (expected, theirs) = scored(kind, "packed"), scored(kind, "eager")
    torch.testing.assert_close(values, expected, atol=5e-6, rtol=0)
    for name, gradient in theirs.items():
        torch.testing.assert_close(gradients[name], gradient, atol=2e-5, rtol=1e-4, msg=name)


def test_what_it_does_not_compute_is_refused():
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma2", **SIZES, head_dim=8))
    module = CausalModule(model.eval(), Temperature(1.0, 64))
    with pytest.raises(ConfigError) as caught:
        module(MicroBatch(Columns(), canned_samples(), CPU), lambda rows: rows.log_probs())
    assert caught.value.code == "fsdp-attention-unsupported" and "softcap" in str(caught.value)


def bounds(device=CPU):
    made = Boundaries()
    made.set([5, 1, 7], device)
    return made


@pytest.mark.parametrize("window", [None, 3])
def test_the_kernel_is_called_with_what_its_schema_has(window):
    """The GPU's path on tensors without data: sizes of heads are padded and cut again, and there is a derivative."""
    inputs = [torch.empty(13, heads, size, device="meta", dtype=torch.bfloat16, requires_grad=True)
              for heads, size in ((4, 12), (2, 12), (2, 6))]
    attended = flash(*inputs, bounds(torch.device("meta")), 0.3, window)
    attended.sum().backward()
    assert attended.shape == (13, 4, 6) and attended.dtype == torch.bfloat16
    assert [one.grad.shape for one in inputs] == [one.shape for one in inputs]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel takes a GPU")
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("sizes", [(64, 64), (12, 6)])
def test_the_kernel_is_the_same_attention(window, sizes):
    wide, narrow = sizes
    inputs = [torch.randn(13, heads, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
              for heads, size in ((4, wide), (2, wide), (2, narrow))]
    results = []
    for attend in (flash, _one_by_one):
        attended = attend(*inputs, bounds(torch.device("cuda")), 0.3, window)
        results.append((attended, *torch.autograd.grad(attended.float().square().sum(), inputs)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0.05, rtol=0.05)
