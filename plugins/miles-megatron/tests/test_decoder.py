"""The shared decoder description: what it reads of a config, what it refuses, and its tensors' rules."""

import pytest
from miles_megatron.decoder import (
    Decoder,
    LayerNorms,
    by_layer_type,
    every_layer,
    refuse,
    rotary,
)
from miles_megatron.mixture import dense_mlp
from miles_megatron.specs import Attention, Rotary
from transformers import PretrainedConfig

from miles_core.errors import ConfigError


def config(**changes):
    values = dict(model_type="toy", num_hidden_layers=3, hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
                  intermediate_size=96, rms_norm_eps=1e-6, vocab_size=96, tie_word_embeddings=False,
                  max_position_embeddings=128, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    return PretrainedConfig(**{**values, **changes})


def names(made):
    return {rule.megatron for rule in made.weight_map().rules}


def test_the_plainest_decoder():
    hf = config()
    made = Decoder(hf=hf, attention=every_layer(hf, Attention(rotary(hf))))
    spec, weight_map = made.spec(), made.weight_map()
    assert spec.constants["kv_channels"] == 16 and spec.attention == (Attention(Rotary(1e4)),) * 3
    assert not spec.constants["add_qkv_bias"] and not spec.post_norms and spec.logit_softcap is None
    assert (weight_map.heads, weight_map.groups, weight_map.head_dim) == (4, 2, 16)
    assert "output_layer.weight" in names(made)
    assert not any("bias" in name or "bda" in name or "q_layernorm" in name for name in names(made))


def test_a_tied_output_layer_is_no_tensor_of_its_own_and_may_be_written_out():
    hf = config(tie_word_embeddings=True)
    made = Decoder(hf=hf, attention=every_layer(hf, Attention(rotary(hf))))
    assert "output_layer.weight" not in names(made) and made.weight_map().ignored == {"lm_head.weight"}


@pytest.mark.parametrize(("parts", "added"), [
    ({"qkv_bias": True}, {"self_attention.linear_qkv.bias"}),
    ({"linear_bias": True}, {"self_attention.linear_qkv.bias", "self_attention.linear_proj.bias",
                             "mlp.linear_fc1.bias", "mlp.linear_fc2.bias"}),
    ({"qk_norm": True}, {"self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"}),
    ({"norms": LayerNorms(after_attention="a", after_mlp="b")}, {"self_attn_bda.norm.weight", "mlp_bda.norm.weight"}),
], ids=lambda parts: next(iter(parts)) if isinstance(parts, dict) else "")  # fmt: skip
def test_each_part_brings_its_tensors(parts, added):
    hf = config()
    plain = Decoder(hf=hf, attention=every_layer(hf, Attention(rotary(hf))))
    more = Decoder(hf=hf, attention=plain.attention, **parts)
    assert names(more) - names(plain) == {"decoder.layers.{layer}." + name for name in added}


def test_a_fused_gate_and_up_is_one_tensor_of_two_halves():
    first, second = dense_mlp((0, 1), fused=True)
    assert first.join == "halves" and first.hf == ("model.layers.{layer}.mlp.gate_up_proj.weight",)
    assert second.join == "same"


def test_fused_queries_keys_and_values_are_one_tensor_of_three_sections():
    hf = config()
    made = Decoder(hf=hf, attention=every_layer(hf, Attention(rotary(hf))), fused_qkv=True, qkv_bias=True)
    rules = [rule for rule in made.weight_map().rules if "linear_qkv" in rule.megatron]
    assert [rule.hf for rule in rules] == [(f"model.layers.{{layer}}.self_attn.qkv_proj.{kind}",)
                                           for kind in ("weight", "bias")]
    assert {(rule.join, rule.sections) for rule in rules} == {("qkv_stacked", (4, 2, 2))}


def test_norms_may_be_after_attention_and_mlp_alone():
    hf = config()
    made = Decoder(hf=hf, attention=every_layer(hf, Attention(rotary(hf))),
                   norms=LayerNorms(before_attention=None, before_mlp=None, after_attention="a", after_mlp="b"))
    assert {name.rpartition("}.")[2] for name in names(made) if "norm" in name} == {
        "self_attn_bda.norm.weight", "mlp_bda.norm.weight", "decoder.final_layernorm.weight"}
    assert (made.spec().pre_norms, made.spec().post_norms) == (False, True)


def test_the_rope_of_a_model_is_the_last_that_there_is():
    hf, rope = config(), Rotary(1e4, interleaved=True)
    spec = Decoder(hf=hf, attention=(Attention(None), Attention(rope), Attention(None))).spec()
    assert spec.rotary == rope and spec.constants["rotary_interleaved"]
    assert Decoder(hf=hf, attention=every_layer(hf, Attention(None))).spec().rotary.fraction == 0


def test_layers_by_type():
    hf = config(layer_types=["sliding_attention", "full_attention", "sliding_attention"])
    near, far = Attention(rotary(hf), window=4), Attention(rotary(hf))
    assert by_layer_type(hf, {"sliding_attention": near, "full_attention": far}) == (near, far, near)
    with pytest.raises(ConfigError, match="toy with layers of type 'sliding_attention' is not supported"):
        by_layer_type(hf, {"full_attention": far})


def test_the_rope_is_read_with_its_scaling():
    llama3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 64}
    assert rotary(config(rope_parameters=llama3)) == Rotary(5e5, scaling="llama3", factor=8.0, original=64)
    linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    assert rotary(config(), linear) == Rotary(1e4, scaling="linear", factor=4.0)
    half = {"rope_theta": 1e4, "partial_rotary_factor": 0.5}
    assert rotary(config(), half, partial=True, interleaved=True) == Rotary(1e4, 0.5, True)
    assert rotary(config(), {"rope_theta": 1e4}, fraction=0.25) == Rotary(1e4, 0.25)


def test_a_part_of_the_rope_that_config_json_states_stays():
    """Before transformers 5.16 an architecture's usual part is put over it."""
    class Older(PretrainedConfig):
        def standardize_rope_params(self):
            self.rope_parameters["partial_rotary_factor"] = 0.25

    stated = Older(**config().to_dict() | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}})
    assert rotary(stated, partial=True) == Rotary(1e4, 0.5)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("more", [{}, {"mscale": 1.0, "mscale_all_dim": 1.0}, {"mscale": 0.7, "mscale_all_dim": 1.0},
                                  {"attention_factor": 0.9}, {"truncate": False, "beta_fast": 8, "beta_slow": 2},
                                  {"factor": None}], ids=str)
def test_yarn_is_transformers_own(more):
    """Frequencies and magnitude, to the last bits of float32."""
    import torch
    from miles_megatron.rope import Rope
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    hf = AutoConfig.for_model("llama", head_dim=64, max_position_embeddings=256, rope_parameters={**YARN, **more})
    wanted, magnitude = ROPE_INIT_FUNCTIONS["yarn"](hf)
    found = rotary(hf)
    torch.testing.assert_close(Rope(64, found).inverse_frequency, wanted, rtol=3e-7, atol=0)
    assert found.magnitude == pytest.approx(magnitude)


@pytest.mark.parametrize("given", [{"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
                                   {"rope_theta": 1e4, "partial_rotary_factor": 0.5}],
                         ids=["dynamic", "a part where the family has none"])  # fmt: skip
def test_a_rope_that_is_not_modelled_is_refused(given):
    with pytest.raises(ConfigError, match=r"toy with .* is not supported .*Fix"):
        rotary(config(), given)


def test_what_the_family_does_not_model_is_refused_by_name():
    refuse(config(hidden_act="silu", bias=None), hidden_act="silu", bias=False, absent=False)
    with pytest.raises(ConfigError, match=r"toy with hidden_act other than 'silu' is not supported \(got gelu\)"):
        refuse(config(hidden_act="gelu"), hidden_act="silu")
