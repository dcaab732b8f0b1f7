"""Mixtures as families describe them: what is refused, what an option may repeat, and a router's bias in 16 bits."""

import logging
from dataclasses import replace

import pytest
from miles_megatron.latent import Latent
from miles_megatron.mixture import Mixture, Names, after

from miles_core.errors import CheckpointError, ConfigError

SIGMOID = Mixture(layers=3, sparse=(1, 2), experts=8, chosen=4, width=48, shared=96, score="sigmoid", bias=True,
                  groups=4, of_groups=2, scale=2.5)  # fmt: skip
LATENT = Latent(query_rank=24, rank=16, plain=24, turned=8, value=16)
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.mark.parametrize(("change", "said"), [
    ({"normalised": False}, "sigmoid scores that are not normalised"),
    ({"chosen": 1, "groups": 1}, "a normalised score of a single expert"),
    ({"score": "softmax"}, "a bias on softmax scores"),
    ({"chosen": 6}, r"6 experts out of 2 groups \(Megatron ranks groups by their best 3\)"),
])  # fmt: skip
def test_a_router_that_megatron_computes_otherwise_is_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        replace(SIGMOID, **change)


def test_what_a_checkpoint_calls_its_tensors():
    names = Names(router="moe.gate.weight", gate="moe.{expert}.w1", up="moe.{expert}.w3", down="moe.{expert}.w2",
                  shared="moe.shared.", shared_gate="moe.shared_gate.weight")
    rules = {rule.megatron.partition("mlp.")[2]: rule for rule in replace(SIGMOID, bias=False, names=names).rules()}
    first = rules["experts.local_experts.{expert}.linear_fc1.weight"]
    assert first.hf == ("model.layers.{layer}.moe.{expert}.w1", "model.layers.{layer}.moe.{expert}.w3")
    assert (first.layers, first.experts, rules["linear_fc1.weight"].layers) == ((1, 2), 8, (0,))
    assert rules["shared_experts.gate_weight"].hf == ("model.layers.{layer}.moe.shared_gate.weight",)
    assert "router.expert_bias" not in rules
    assert after(4, 1) == (1, 2, 3) and after(2, 5) == ()


@pytest.fixture(scope="module")
def made(megatron):
    """(bf16) -> (config, model, spec, weight map) of a decoder with latent attention and this mixture."""
    import torch
    from miles_megatron import model
    from miles_megatron.decoder import Decoder, every_layer, rotary
    from miles_megatron.specs import Attention
    from transformers import Qwen3Config

    hf = Qwen3Config(vocab_size=96, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4,
                     head_dim=32, intermediate_size=96, max_position_embeddings=256, tie_word_embeddings=False)
    decoder = Decoder(
        hf=hf, attention=every_layer(hf, Attention(rotary(hf, fraction=0.25), mixer=LATENT)), mixture=SIGMOID,
        mixing=LATENT.rules((0, 1, 2)), constants={"kv_channels": LATENT.head_dim}, also=LATENT.also,
        left=("model.layers.3.",),
    )  # fmt: skip
    spec = decoder.spec()

    def make(bf16=False, overrides=None):
        config = model.transformer_config(spec, overrides, bf16=bf16)
        torch.manual_seed(0)
        return config, model.build(config, spec), spec, decoder.weight_map()

    return make


def test_options_that_say_the_same_are_passed_over(made):
    """As scripts of Megatron-LM's repeat an architecture; what differs is refused by name."""
    from miles_megatron.config_overrides import check_architecture

    same = {"multi_latent_attention": True, "kv_lora_rank": 16, "v_head_dim": 16, "qk_layernorm": True,
            "moe_router_pre_softmax": True, "moe_router_num_groups": 4, "rotary_percent": 1.0}
    _, _, spec, _ = made()
    check_architecture(same, spec)
    config, *_ = made(overrides={"multi_latent_attention": True, "moe_router_pre_softmax": True, "qk_layernorm": True})
    assert not config.multi_latent_attention and not config.moe_router_pre_softmax
    with pytest.raises(ConfigError, match=r"kv_lora_rank .*\(got 17\)"):
        check_architecture({"kv_lora_rank": 17}, spec)
    with pytest.raises(ConfigError, match="multi_latent_attention disagrees|moe_router_num_groups disagrees"):
        made(overrides={"moe_router_num_groups": 2})


def test_a_routers_bias_keeps_its_bits_in_sixteen_bit_models(made, tmp_path):
    """Written, read into a rounded model, streamed and exported: 24 bits all the way, beside matrices of 8."""
    import json

    import torch
    from miles_megatron import optimizer, weights
    from safetensors.torch import load_file

    config, model, _, weight_map = made(bf16=True)
    wrapped = optimizer.rounded(config, model)
    assert model.decoder.layers[1].mlp.router.local_tokens_per_expert.dtype == torch.float32
    drawn = torch.rand(8, generator=torch.Generator().manual_seed(1))
    model.decoder.layers[1].mlp.router.expert_bias.copy_(drawn)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text('{"model_type": "none"}')
    kept = {name for name, tensor in weights.hf_stream(wrapped, weight_map) if getattr(tensor, "keeps_dtype", False)}
    assert kept == {BIAS, BIAS.replace(".1.", ".2.")}, "an engine in 16 bits gets it whole, too"
    weights.export_hf(tmp_path / "out", tmp_path / "source", weights.hf_stream(wrapped, weight_map))
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found[BIAS], drawn) and found["model.norm.weight"].dtype == torch.bfloat16
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    _, again, *_ = made(bf16=True)
    weights.load_hf(tmp_path / "out", optimizer.rounded(config, again), weight_map)
    assert torch.equal(again.decoder.layers[1].mlp.router.expert_bias, drawn)


def test_tensors_that_stay_behind_are_announced_and_no_others(made, tmp_path, caplog):
    import torch
    from miles_megatron import weights
    from safetensors.torch import save_file

    _, model, _, weight_map = made()
    tensors = {name: tensor.clone() for name, tensor in weights.hf_stream(model, weight_map)}
    save_file({**tensors, "model.layers.3.eh_proj.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        weights.load_hf(tmp_path, model, weight_map)
    assert "1 tensors, such as model.layers.3.eh_proj.weight; enable the plugin" in caplog.text
    save_file({**tensors, "model.layers.30.eh_proj.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 unexpected: model\.layers\.30\.eh_proj"):
        weights.load_hf(tmp_path, model, weight_map)
