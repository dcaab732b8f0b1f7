"""--true-on-policy-mode with the trainer fsdp: what is refused, and what both sides compute.

That a server on a GPU has the same bits is measured (docs/benchmarks.md); tests/sglang has what a CPU can tell of it.
"""

from __future__ import annotations

import pytest
import torch
from miles_fsdp import server_kernels
from miles_fsdp.lean import keep_less
from miles_testing import tiny_checkpoint
from miles_testing.tiny import run_file

from miles_core.errors import ConfigError
from miles_core.plugins.plan import prepare


@pytest.fixture
def plan(tmp_path):
    def made(*flags, experts=False):
        perf = {"trainer": "fsdp", "bf16": True}
        path = run_file(tmp_path / "run.toml", ["sglang"], {"perf": perf, "rollout": {"engine": "sglang"}}, {},
                        checkpoint=tiny_checkpoint(experts=experts))
        return prepare(path, ["--true-on-policy-mode", *flags])

    return made


def test_servers_run_the_trainers_module_by_kernels_that_it_shares(plan):
    server = plan().config.surface("server")
    assert (server["model_impl"], server["attention_backend"], server["enable_deterministic_inference"]) == (
        "transformers", "triton", True)


@pytest.mark.parametrize(("flags", "fact"), [
    (["--engine", "local"], "local"), (["--no-bf16"], "perf.bf16"), (["--engine-dtype", "float32"], "float32"),
    (["--max-lag", "1"], "max_lag (--max-lag)"), (["--use-rollout-logprobs"], "use_rollout_logprobs"),
    (["--rollout-num-gpus-per-engine", "2"], "got 2"), (["--attn-implementation", "sdpa"], "sdpa"),
])  # fmt: skip
def test_what_would_compute_otherwise_is_refused(plan, flags, fact):
    with pytest.raises(ConfigError) as caught:
        plan(*flags)
    assert caught.value.code == "true-on-policy-unavailable" and fact in str(caught.value)


def test_mixtures_are_refused(plan):
    with pytest.raises(ConfigError) as caught:
        plan(experts=True)
    assert caught.value.code == "true-on-policy-unavailable" and "qwen3_moe" in str(caught.value)


@pytest.mark.parametrize("flags", [["--sglang-attention-backend", "flashinfer"],
                                   ["--sglang-speculative-algorithm", "NGRAM"]])
def test_servers_that_would_compute_otherwise_are_refused(plan, flags):
    with pytest.raises(ConfigError) as caught:
        plan(*flags)
    assert caught.value.code == "server-not-on-policy" and flags[1] in str(caught.value)


def test_a_trainer_on_a_cpu_has_none_of_the_kernels():
    with pytest.raises(ConfigError) as caught:
        server_kernels.begin(torch.device("cpu"))
    assert caught.value.code == "fsdp-true-on-policy-kernels" and "cpu" in str(caught.value)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_the_tables_of_a_rope_are_made_where_they_are_used_and_stay_what_they_are(kind):
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(
        kind, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=64))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    rope = model.model.rotary_emb
    rope.inv_freq = rope.inv_freq + 1
    server_kernels.tables(model, torch.device("cpu"))
    assert before and all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_of_products_by_cublas_are_a_linear_layers(bias):
    torch.manual_seed(0)
    plain, ours = (torch.nn.Linear(5, 7, bias=bias, dtype=torch.float64) for _ in range(2))
    ours.load_state_dict(plain.state_dict())
    server_kernels.products(torch.nn.Sequential(ours))
    rows = torch.randn(2, 3, 5, dtype=torch.float64)
    given = [rows.clone().requires_grad_() for _ in range(2)]
    outputs = [layer(one) for layer, one in zip((plain, ours), given, strict=True)]
    assert torch.equal(*outputs)
    for output in outputs:
        (output**2).sum().backward()
    pairs = [given, *zip(plain.parameters(), ours.parameters(), strict=True)]
    for one, other in pairs:
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)


def test_gradients_of_products_leave_out_what_is_frozen():
    layer = torch.nn.Linear(3, 2)
    server_kernels.products(layer)
    layer.weight.requires_grad_(False)
    layer(torch.ones(4, 3)).sum().backward()
    assert layer.weight.grad is None and layer.bias.grad.tolist() == [4.0, 4.0]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_forward_that_is_differentiated_has_the_bits_of_one_that_is_not(kind):
    """A rollout's only step compares its own log-probs with the servers'."""
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model(
        kind, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=64), dtype=torch.bfloat16)
    tokens = torch.arange(17)[None]
    assert keep_less(model)
    with torch.no_grad():
        plain = model(tokens, use_cache=False).last_hidden_state
        server_kernels.prepare(model, torch.device("cpu"))
        scored = model(tokens, use_cache=False).last_hidden_state
    stepped = model(tokens, use_cache=False).last_hidden_state
    assert stepped.requires_grad and torch.equal(scored, stepped) and torch.equal(plain, scored)
