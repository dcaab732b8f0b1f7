"""Sizes of published checkpoints from their config.json: the totals that their authors state."""

from dataclasses import replace

import pytest
from miles_megatron import estimate
from miles_megatron.architecture import architecture_of
from miles_megatron.heads import sizes_of

DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
    "num_key_value_heads": 128, "vocab_size": 129280, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
GLM_45 = {
    "model_type": "glm4_moe", "num_hidden_layers": 92, "hidden_size": 5120, "num_attention_heads": 96,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151552, "intermediate_size": 12288,
    "moe_intermediate_size": 1536, "n_routed_experts": 160, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "first_k_dense_replace": 3, "use_qk_norm": True,
}  # fmt: skip
MINIMAX_M2 = {
    "model_type": "minimax_m2", "num_hidden_layers": 62, "hidden_size": 3072, "num_attention_heads": 48,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 200064, "intermediate_size": 1536,
    "num_local_experts": 256, "num_experts_per_tok": 8, "use_qk_norm": True,
}  # fmt: skip
GLM_47_FLASH = {
    "model_type": "glm4_moe_lite", "num_hidden_layers": 47, "hidden_size": 2048, "num_attention_heads": 20,
    "num_key_value_heads": 20, "vocab_size": 154880, "intermediate_size": 10240, "moe_intermediate_size": 1536,
    "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 4, "q_lora_rank": 768, "kv_lora_rank": 512,
    "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
    "mlp_layer_types": ["dense"] + ["sparse"] * 46,
}  # fmt: skip
QWEN3_NEXT = {
    "model_type": "qwen3_next", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 151936, "intermediate_size": 5120,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 512, "num_experts_per_tok": 10,
    "decoder_sparse_step": 1, "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
QWEN3_5 = {  # whose text model is a part of it
    "model_type": "qwen3_5_moe", "tie_word_embeddings": False, "vision_config": {"hidden_size": 1152},
    "text_config": {key: value for key, value in QWEN3_NEXT.items() if key != "intermediate_size"} | {
        "model_type": "qwen3_5_moe_text", "num_hidden_layers": 40, "vocab_size": 248320, "num_experts": 256,
        "num_experts_per_tok": 8},
}  # fmt: skip
KIMI_K2 = {
    **DEEPSEEK_V3, "model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 163840,
    "n_routed_experts": 384, "first_k_dense_replace": 1,
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "num_hidden_layers": 24, "hidden_size": 2880, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "intermediate_size": 2880, "num_local_experts": 32,
    "num_experts_per_tok": 4,
}  # fmt: skip
PUBLISHED = {  # billions of parameters: in all, of a token where the authors say it to two digits
    "deepseek-v3": (DEEPSEEK_V3, 671, 37), "glm-4.5": (GLM_45, 355, 32), "minimax-m2": (MINIMAX_M2, 230, 10),
    "glm-4.7-flash": (GLM_47_FLASH, 30, None), "qwen3-next": (QWEN3_NEXT, 80, None),
    "qwen3.5-35b-a3b": (QWEN3_5, 35, 3), "kimi-k2": (KIMI_K2, 1030, 32), "gpt-oss-20b": (GPT_OSS, 20.9, 3.6),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_totals_are_the_published_ones(config, name):
    said, total, active = PUBLISHED[name]
    made = config(said)
    size, model = architecture_of(made), estimate.dimensions_of(made)
    assert size.uncounted == []
    assert sum(estimate.parameters(model, size.layers, True, True)) / 1e9 == pytest.approx(total, rel=0.02)
    if active:  # with the embedding or without it
        assert estimate.active_parameters(size) / 1e9 == pytest.approx(active, rel=0.15)


def test_a_head_of_latent_attention_is_both_its_parts(config):
    """transformers writes the turned part alone as head_dim; the cost of attention is that of keys and values."""
    size = architecture_of(config({**DEEPSEEK_V3, "head_dim": 64, "num_key_value_heads": 1}))
    assert (size.head_dim, size.value_dim, size.groups) == (192, 128, 128)
    assert size.attention == 61 * 128 * 160


def test_layers_with_experts_alone_have_no_other_name_for_their_width(config):
    size = architecture_of(config(MINIMAX_M2))
    assert (size.sparse, size.expert_ffn, size.shared_ffn) == (62, 1536, None)


def test_linear_attention_has_sizes_of_its_own(config):
    """Its layers are named, or all but every n-th; the square of the sequence is the others' alone."""
    named = {**QWEN3_NEXT, "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention"] * 2}
    size, few = (architecture_of(config(said)) for said in (QWEN3_NEXT, named))
    assert (size.linear, few.linear) == (36, 2)
    assert size.attention == 12 * 16 * 256
    linear, full = 2048 * (2 * 2048 + 2 * 4096 + 64) + 4096 * 2048, 2048 * 256 * 2 * (16 + 2)
    assert estimate.mixing(size) == ((3 * linear + full) // 4, 0)
    assert estimate.active_parameters(size) / 1e9 == pytest.approx(3, rel=0.2)  # with the output layer
    assert architecture_of(config({**QWEN3_NEXT, "full_attention_interval": None})).linear == 0
    unknown = {key: value for key, value in QWEN3_NEXT.items() if key != "linear_key_head_dim"}
    assert architecture_of(config(unknown)).uncounted == ["linear_key_head_dim"]


@pytest.mark.parametrize("layers", [
    {"layer_types": ["sliding_attention", "full_attention"] * 12}, {"sliding_window_pattern": 2}])  # fmt: skip
def test_attention_with_a_window_reaches_as_far_as_the_window(config, layers):
    """Named layers, or all but every n-th; against the pairs of a query and a key, counted one by one."""
    size = architecture_of(config({**GPT_OSS, **layers, "sliding_window": 128}))
    for length in (100, 2048):
        seen = [sum(min(at + 1, reach) for at in range(length)) for reach in (128, length)]
        pairs = 12 * 64 * 64 * sum(seen)
        assert size.attention_of(length) * length**2 / 2 == pytest.approx(pairs, rel=0.02)
    whole = architecture_of(config(GPT_OSS))
    assert whole.attention_of(2048) == whole.attention == size.attention, "no layer is said to have one"


@pytest.mark.parametrize(("layers", "count"), [
    ({"layer_types": ["chunked_attention", "full_attention"] * 12}, 12), ({"no_rope_layers": [1, 0, 1, 1] * 6}, 18),
    ({"no_rope_layers": []}, 18)])  # fmt: skip
def test_chunked_attention_ends_with_the_chunk(config, layers, count):
    """Llama 4's, by name or by the layers with a rope; against the pairs of a query and a key, counted one by one."""
    size = architecture_of(config({**GPT_OSS, **layers, "attention_chunk_size": 128}))
    for length in (100, 300, 2048):
        chunked, whole = (sum(at % reach + 1 for at in range(length)) for reach in (128, length))
        pairs = 64 * 64 * (count * chunked + (24 - count) * whole)
        assert size.attention_of(length) * length**2 / 2 == pytest.approx(pairs, rel=0.02)
    assert architecture_of(config({**GPT_OSS, **layers})).attention_of(2048) == size.attention, "no chunks"


def test_compressed_keys_count_no_window_in_the_first_place(config):
    """DeepSeek-V4's: what a window sees is not in `attention`, so it is not taken off once more."""
    size = sizes_of(config({
        "num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16,
        "vocab_size": 64, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "q_lora_rank": 16, "o_lora_rank": 8, "o_groups": 2, "hc_mult": 2, "index_n_heads": 2, "index_head_dim": 8,
        "sliding_window": 8, "layer_types": ["sliding_attention", "compressed_sparse_attention"] * 2}))
    assert size.attention_of(4096) == size.attention == 4 * 16 * 2 // 4


def test_layers_of_one_sublayer_are_attention_or_an_mlp(config):
    """By words or letters; without a gate an MLP has two matrices."""
    run = config({**QWEN3_NEXT, "num_hidden_layers": None, "mlp_hidden_act": "relu2", "pattern": "M*E-ME"})
    size = architecture_of(replace(run, model=replace(run.model, model_name="odd"), stated={
        "model_spec:odd": ("layer_types=pattern",)}))
    named = architecture_of(config({**QWEN3_NEXT, "layer_types": ["linear_attention", "full_attention", "moe", "mlp"]}))
    assert (size.layers, size.linear, size.full, size.sparse, size.alone, size.mlps) == (6, 2, 1, 2, 3, 3)
    assert (named.linear, named.full, named.sparse, named.alone) == (1, 48 - 1 - 2, 1, 2)
    assert architecture_of(config({**QWEN3_NEXT, "layer_types": ["linear_attention", "mlp"]})).experts is None
    assert size.uncounted == [] and size.attention == 16 * 256
    linear, full = 2048 * (2 * 2048 + 2 * 4096 + 64) + 4096 * 2048, 2048 * 256 * 2 * (16 + 2)
    assert estimate.mixing(size)[0] == (2 * linear + full) // 6
    mlps = 2 * 2048 * 5120 + 2 * 2048 * (2 * 512 * (10 + 1) + 512)
    assert estimate.active_parameters(size) == 6 * estimate.mixing(size)[0] + mlps + 2048 * 151936


def test_a_gate_of_attention_is_as_wide_as_its_queries(config):
    plain, gated = (architecture_of(config({**QWEN3_NEXT, "attn_output_gate": gate})) for gate in (False, True))
    full = QWEN3_NEXT["num_hidden_layers"] // QWEN3_NEXT["full_attention_interval"]
    assert gated.layers * estimate.mixing(gated)[0] - plain.layers * estimate.mixing(plain)[0] == full * 2048 * 16 * 256


def test_what_a_family_states_of_its_config_json_is_how_it_is_read(config):
    """Another name for a key counts where config.json has it; a number where config.json leaves the key out."""
    run = config({"model_type": "odd", "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4,
                  "intermediate_size": 32, "intermediate_size_mlp": 128, "num_local_experts": 4, "every": 2})
    words = ("intermediate_size=intermediate_size_mlp", "moe_intermediate_size=intermediate_size",
             "decoder_sparse_step=every", "vocab_size=512", "hidden_size=32", "head_dim=not_there")
    stated = replace(run, model=replace(run.model, model_name="odd"), stated={"model_spec:odd": words})
    size, unread = architecture_of(stated), architecture_of(run)
    assert (size.ffn, size.expert_ffn, size.sparse, size.vocab) == (128, 32, 4, 512)
    assert (size.hidden, size.head_dim) == (64, 16)
    assert (unread.ffn, unread.expert_ffn, unread.sparse, unread.vocab) == (32, 32, 8, None)
