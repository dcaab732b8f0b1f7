import pytest
import torch

from miles_core.errors import ConfigError, UnknownKeyError


def gradients(model, logits):
    model.zero_grad()
    logits.log_softmax(-1)[:, 5].sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def one_by_one(hf, sequences):
    with torch.no_grad():
        return torch.cat([hf(s[None]).logits[0] for s in sequences])


def test_packed_logits_are_hugging_faces(hf_model, port, packed_logits, sequences, kind):
    hf = hf_model(**kind)
    ours, _ = port(hf)
    expected = one_by_one(hf, sequences)
    with torch.no_grad():
        logits = packed_logits(ours.eval(), sequences)
    assert expected.std() > 0.3
    assert (logits - expected).abs().max() <= 5e-6


@pytest.mark.parametrize("kind", [{}, {"moe": True}], ids=["dense", "moe"])
def test_packing_does_not_change_a_probability(hf_model, port, packed_logits, sequences, kind):
    ours, _ = port(hf_model(**kind))
    with torch.no_grad():
        first = packed_logits(ours, sequences).log_softmax(-1).split([len(s) for s in sequences])
        order = [3, 0, 7, 5, 1, 6, 2]  # and one sequence fewer
        second = packed_logits(ours, [sequences[i] for i in order]).log_softmax(-1)
        second = second.split([len(sequences[i]) for i in order])
    for i, log_probs in zip(order, second, strict=True):
        assert ((log_probs - first[i]).exp() - 1).abs().max() <= 1e-5


def test_gradients_are_hugging_faces(hf_model, port, packed_logits, sequences):
    hf = hf_model()
    ours, weight_map = port(hf)
    got = gradients(ours, packed_logits(ours, sequences))
    hf.zero_grad()
    torch.cat([hf(s[None]).logits[0] for s in sequences]).log_softmax(-1)[:, 5].sum().backward()
    pairs = {"model.norm.weight": "decoder.final_layernorm.weight", "lm_head.weight": "output_layer.weight",
             "model.layers.0.self_attn.o_proj.weight": "decoder.layers.0.self_attention.linear_proj.weight",
             "model.layers.1.self_attn.k_norm.weight": "decoder.layers.1.self_attention.k_layernorm.weight",
             "model.layers.2.mlp.down_proj.weight": "decoder.layers.2.mlp.linear_fc2.weight",
             "model.embed_tokens.weight": "embedding.word_embeddings.weight"}  # fmt: skip
    theirs = dict(hf.named_parameters())
    for a, b in pairs.items():
        expected = theirs[a].grad
        assert (got[b] - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("kind", [{}, {"moe": True}], ids=["dense", "moe"])
@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_recompute_gives_the_same_gradients(hf_model, port, packed_logits, sequences, kind, granularity):
    hf = hf_model(**kind)
    plain, _ = port(hf)
    again, _ = port(hf, recompute_granularity=granularity)
    expected = gradients(plain.train(), packed_logits(plain, sequences))
    got = gradients(again.train(), packed_logits(again, sequences))
    for name, grad in expected.items():
        assert torch.allclose(grad, got[name], atol=1e-5 * float(grad.abs().max()), rtol=0), name


def test_bf16_is_near(hf_model, port, packed_logits, sequences):
    hf = hf_model()
    ours, _ = port(hf, bf16=True)
    with torch.no_grad():
        logits = packed_logits(ours, sequences).float()
    assert (logits - one_by_one(hf, sequences)).abs().mean() <= 0.05


def test_the_model_returns_hidden_states(hf_model, port):
    from miles_megatron import packed_layout

    ours, _ = port(hf_model())
    tokens = torch.zeros(1, 11, dtype=torch.int64)
    hidden = ours(tokens, None, None, packed_seq_params=packed_layout.packed_rows([0, 4, 9]))
    assert hidden.shape == (11, 1, 64) and ours.output_weight.shape == (97, 64)


def test_a_factor_on_logits_is_on_hidden_states_and_not_on_values(hf_model, port):
    from dataclasses import replace

    from miles_megatron import families, model, packed_layout, value

    plain = families.FAMILIES["qwen3"].model_spec(hf_model().config)
    scaled = replace(plain, logit_scale=0.5)
    built = model.build(model.transformer_config(scaled), scaled)
    rows = {"packed_seq_params": packed_layout.packed_rows([0, 4, 9])}
    hidden = built(torch.zeros(1, 11, dtype=torch.int64), None, None, **rows)
    built.logit_scale = 1.0
    assert torch.equal(2 * hidden, built(torch.zeros(1, 11, dtype=torch.int64), None, None, **rows))
    assert value.build(model.transformer_config(scaled), scaled).logit_scale == 1


@pytest.fixture(scope="module")
def spec(hf_model):
    from miles_megatron import families

    return families.FAMILIES["qwen3"].model_spec(hf_model().config)


def config(spec, **overrides):
    from miles_megatron import model

    layout = {k: overrides.pop(k) for k in ("tensor", "pipeline", "sequence_parallel", "bf16") if k in overrides}
    return model.transformer_config(spec, overrides, **layout)


def test_an_override_may_repeat_the_checkpoint_but_not_contradict_it(spec):
    assert config(spec, num_layers=3).num_layers == 3
    with pytest.raises(ConfigError, match=r"num_layers disagrees.*says 3 \(got 4\).*Fix"):
        config(spec, num_layers=4)


def test_an_unknown_override_is_refused(spec):
    with pytest.raises(UnknownKeyError, match="num_layer"):
        config(spec, num_layer=4)


def test_what_megatron_refuses_is_a_config_error(spec):
    with pytest.raises(ConfigError, match="must be a multiple of tensor_model_parallel_size"):
        config(spec, tensor=3)


def test_what_needs_transformer_engine_is_announced_and_off(spec, caplog):
    assert config(spec, apply_rope_fusion=True).apply_rope_fusion is False
    assert "apply_rope_fusion is off" in caplog.text


def test_defaults_can_be_overridden(hf_model):
    from miles_megatron import families

    moe = families.FAMILIES["qwen3_moe"].model_spec(hf_model(moe=True).config)
    assert config(moe).moe_aux_loss_coeff == 0 and config(moe).moe_router_dtype == "fp32"
    changed = config(moe, moe_aux_loss_coeff=1e-2)
    assert changed.moe_router_load_balancing_type == "aux_loss"


def test_experts_are_not_grouped_by_the_ranks_that_hold_them(hf_model):
    """Megatron makes as many groups as there are expert-parallel ranks: with two, log-probs are another model's."""
    from miles_megatron import families

    with pytest.raises(ConfigError, match="moe_router_topk_limited_devices") as caught:
        config(families.FAMILIES["qwen3_moe"].model_spec(hf_model(moe=True).config), moe_router_topk_limited_devices=1)
    assert caught.value.code == "constant-disagrees-with-checkpoint"


@pytest.mark.parametrize("change", [{"attention_bias": True}, {"hidden_act": "gelu"}, {"use_sliding_window": True}])
def test_variants_that_are_not_modelled_are_refused(hf_model, change):
    import copy

    from miles_megatron import families

    hf = copy.deepcopy(hf_model().config)
    for name, value in change.items():
        setattr(hf, name, value)
    with pytest.raises(ConfigError, match=next(iter(change))):
        families.FAMILIES["qwen3"].model_spec(hf)
