"""What --true-on-policy-mode cannot hold does not start; what the two sides share is told once."""

import json

import pytest
from miles_megatron.on_policy import FAMILIES

from miles_core.errors import ConfigError

DENSE = {"model_type": "qwen3", "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
         "head_dim": 32, "num_hidden_layers": 2, "num_key_value_heads": 2, "vocab_size": 64,
         "max_position_embeddings": 1024}  # fmt: skip

SETTINGS = {
    "perf.bf16": ["--bf16"],
    "rollout.engine": ["--engine", "sglang"],
    "rollout.engine_dtype": ["--engine-dtype", "bfloat16"],
    "rollout.max_lag": ["--max-lag", 1],
    "megatron.tensor_model_parallel_size": ["--actor-num-gpus-per-node", 2, "--tensor-model-parallel-size", 2],
    "algorithm.use_rollout_logprobs": ["--use-rollout-logprobs"],
    "algorithm.skip_actor_forward_only": ["--skip-actor-forward-only"],
}


@pytest.fixture
def on_policy(plan, tmp_path):
    """(*flags, **changes to config.json) -> the plan with the mode on."""

    def make(*flags, **changes):
        (tmp_path / "config.json").write_text(json.dumps({**DENSE, **changes}))
        return plan("--hf-checkpoint", tmp_path, "--true-on-policy-mode", "--no-bf16", *flags)

    return make


@pytest.mark.parametrize("key", SETTINGS)
def test_settings_outside_of_the_contract_are_refused(on_policy, key):
    with pytest.raises(ConfigError) as caught:
        on_policy(*SETTINGS[key])
    assert caught.value.code == "true-on-policy-unavailable" and key in str(caught.value)


def test_another_architecture_is_refused(on_policy):
    with pytest.raises(ConfigError) as caught:
        on_policy("--plugin", "specs-gemma", model_type="gemma3_text")
    assert caught.value.code == "true-on-policy-unavailable" and "gemma3_text" in str(caught.value)


@pytest.mark.parametrize("flags", [
    ["--actor-num-gpus-per-node", 2], ["--actor-num-gpus-per-node", 2, "--pipeline-model-parallel-size", 2],
    ["--rollout-top-p", 0.9, "--rollout-top-k", 5]], ids=["data", "pipeline", "sampling"])  # fmt: skip
def test_what_changes_no_sum_is_free(on_policy, flags):
    assert on_policy(*flags, hidden_size=1024).config.rollout.rollout_max_context_len is None


def test_what_the_two_sides_share_is_told_once():
    from miles_local import products, weights
    from miles_megatron.attention import KEY_CHUNK

    assert set(FAMILIES) == set(weights.FAMILIES)
    assert KEY_CHUNK == products.KEY_CHUNK
