"""Plans count the heads of every layer, where config.json has several kinds."""


import pytest
from miles_megatron import engine_weights, estimate
from miles_megatron.heads import Heads, heads_of, sizes_of
from miles_megatron.layout import Layout, check_layout, cuts_groups

from miles_core.errors import BatchError

GEMMA_4 = {
    "model_type": "gemma4_text", "num_hidden_layers": 60, "hidden_size": 5376, "intermediate_size": 21504,
    "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256, "vocab_size": 262144,
    "tie_word_embeddings": True, "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 10,
    "global_head_dim": 512, "num_global_key_value_heads": 4, "attention_k_eq_v": True,
}  # fmt: skip
KINDS = (Heads(50, 256, 16), Heads(10, 512, 4, made=1))


def written_by_transformers(keys):
    wide = {"head_dim": keys["global_head_dim"], "num_key_value_heads": keys["num_global_key_value_heads"]}
    own = {str(n): wide for n, kind in enumerate(keys["layer_types"]) if kind == "full_attention"}
    return {key: value for key, value in keys.items() if "global" not in key} | {"per_layer_config": own}


@pytest.mark.parametrize("form", [dict, written_by_transformers])
def test_heads_are_counted_layer_by_layer(form, config):
    run = config(form(GEMMA_4))
    size, model = sizes_of(run), estimate.dimensions_of(run)
    assert heads_of(size) == KINDS
    assert size.attention == 32 * (50 * 256 + 10 * 512)
    layer = 5376 * (50 * 256 * (64 + 32) + 10 * 512 * (64 + 4)) // 60
    assert estimate.mixing(size) == (layer, 0)
    assert sum(estimate.parameters(model, 60, True, True)) / 1e9 == pytest.approx(30.7, abs=0.05)
    assert engine_weights.cache(run, model) == 2 * 2 * (50 * 256 * 16 + 10 * 512 * 4) / 1


def test_values_of_their_own_and_one_number_of_heads(config):
    size = sizes_of(config({**GEMMA_4, "attention_k_eq_v": False}))
    assert heads_of(size) == (Heads(50, 256, 16), Heads(10, 512, 16))


def test_a_model_with_one_kind_of_heads_is_as_it_was(config):
    size = sizes_of(config({key: value for key, value in GEMMA_4.items() if "global" not in key}))
    assert type(size).__name__ == "Architecture" and heads_of(size) == (Heads(60, 256, 16),)


def test_ranks_have_to_divide_the_fewest_heads_or_share_them(config):
    run, eight = config({**GEMMA_4, "num_global_key_value_heads": 3}), Layout(world=8, tensor=8)
    with pytest.raises(BatchError) as caught:
        check_layout(eight, sizes_of(run), run)
    assert caught.value.code == "model-size-not-divisible" and caught.value.got == "3 / 8"
    assert "num_global_key_value_heads" in caught.value.what
    size = sizes_of(config(GEMMA_4))
    assert cuts_groups(eight, size) and not cuts_groups(Layout(world=4, tensor=4), size)


def test_what_norms_after_and_side_by_side_keep_is_counted(config):
    """In widths of a token, of which each norm keeps a root mean square more."""
    keys = {"enable_moe_block": True, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 704,
            "shared_expert_intermediate_size": 2112, "norms_after": 2}
    model = estimate.dimensions_of(config({**GEMMA_4, **keys}))
    plain = estimate.dimensions_of(config({**GEMMA_4, **keys, "enable_moe_block": False, "norms_after": 0}))
    assert (model.norms_after, model.side_by_side, plain.norms_after, plain.side_by_side) == (2, True, 0, False)
    more = sum(estimate.saved_activations(model, True).values()) - sum(estimate.saved_activations(plain, True).values())
    assert more == (2 + 3) * 5376 * model.value + (2 + 4) * estimate.FP32
