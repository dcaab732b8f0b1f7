"""What --true-on-policy-mode cannot hold does not start; its limits are those of the two sides' code."""

import json

import pytest
from miles_megatron.on_policy import DEEPEST, LONGEST

from miles_core.errors import ConfigError

DENSE = {"model_type": "qwen3", "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
         "head_dim": 32, "num_hidden_layers": 2, "num_key_value_heads": 2, "vocab_size": 64,
         "max_position_embeddings": 1024}  # fmt: skip

SETTINGS = {
    "trains in float32": ["--bf16"],
    "needs the local engine": ["--engine", "mine"],
    "decodes in float32": ["--engine-dtype", "bfloat16"],
    "the same weights sampled": ["--max-lag", 1],
    "one trainer rank": ["--actor-num-gpus-per-node", 2],
    "not computed (got use_rollout_logprobs": ["--use-rollout-logprobs"],
    "not computed (got skip_actor_forward_only": ["--skip-actor-forward-only"],
    "up to 256 tokens": ["--rollout-max-context-len", 257],
}
CHECKPOINTS = {
    "dense Qwen3 (got model_type qwen3_moe)": {"model_type": "qwen3_moe"},
    "dense Qwen3 (got model_type llama)": {"model_type": "llama"},
    "hidden_size 1024": {"hidden_size": 1024},
    "intermediate_size 3072": {"intermediate_size": 3072},
    "num_attention_heads x head_dim 1024": {"num_attention_heads": 8, "head_dim": 128},
}


@pytest.fixture
def on_policy(plan, tmp_path):
    """(*flags, **changes to config.json) -> the plan with the mode on."""

    def make(*flags, **changes):
        (tmp_path / "config.json").write_text(json.dumps({**DENSE, **changes}))
        return plan("--hf-checkpoint", tmp_path, "--true-on-policy-mode", "--no-bf16", *flags)

    return make


@pytest.mark.parametrize("message", SETTINGS)
def test_settings_outside_of_the_contract_are_refused(on_policy, message):
    with pytest.raises(ConfigError) as caught:
        on_policy(*SETTINGS[message])
    assert "true_on_policy_mode" in str(caught.value) and message in str(caught.value)
    assert "Fix:" in str(caught.value)


@pytest.mark.parametrize("message", CHECKPOINTS)
def test_models_outside_of_the_contract_are_refused(on_policy, message):
    with pytest.raises(ConfigError) as caught:
        on_policy(**CHECKPOINTS[message])
    assert "true_on_policy_mode" in str(caught.value) and message in str(caught.value)


def test_the_context_is_bounded_and_announced(on_policy):
    plan = on_policy("--rollout-top-p", 0.9, "--rollout-top-k", 5)
    assert plan.config.rollout.rollout_max_context_len == LONGEST
    assert any("longer prompts are left out" in note for note in plan.notes)


def test_a_bound_that_is_given_or_the_models_own_stays(on_policy):
    assert on_policy("--rollout-max-context-len", 200).config.rollout.rollout_max_context_len == 200
    assert on_policy(max_position_embeddings=64).config.rollout.rollout_max_context_len is None


def test_the_limits_are_those_of_the_code():
    from miles_local.decode import PLAIN_DEPTH
    from miles_megatron.attention import EXACT_KEYS

    assert (LONGEST, DEEPEST) == (EXACT_KEYS, PLAIN_DEPTH)
