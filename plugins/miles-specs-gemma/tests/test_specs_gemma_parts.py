"""Every part that Gemma adds is seen by the parity kit: with one of them wrong, the kit says so."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from miles_megatron.decoder import DecoderFamily, LayerNorms
from miles_megatron.testing.parity import TINY, cases, model_parity
from miles_specs_gemma.families import gemma2, gemma3_text, gemma4_text

from miles_core.errors import ConfigError

ALL = cases(Path(__file__).with_name("parity.toml"))
CASES = {case.family: case for case in reversed(ALL)}
PER_LAYER = next(case for case in ALL if case.name == "Gemma 4, text, with embeddings for every layer")
EXPERTS = next(case for case in ALL if case.name == "Gemma 4, text, with experts")


def everywhere(**changes):
    return lambda made: {"attention": tuple(replace(one, **changes) for one in made.attention)}


WRONG = {
    "no window": everywhere(window=None),
    "a window one longer": lambda made: {"attention": tuple(
        replace(one, window=one.window and one.window + 1) for one in made.attention)},
    "windows in the other layers": lambda made: {"attention": made.attention[::-1]},
    "no softcap on scores": everywhere(softcap=None),
    "no softcap on logits": lambda made: {"logit_softcap": None},
    "norm weights about one": lambda made: {"zero_centred_norms": False},
    "an embedding as it is": lambda made: {"embedding_scale": 1.0},
    "scores by the size of a head": lambda made: {"softmax_scale": None},
    "another activation": lambda made: {"activation": "silu"},
    "norms after exchanged": lambda made: {"norms": LayerNorms(
        before_mlp=made.norms.before_mlp, after_attention=made.norms.after_mlp, after_mlp=made.norms.after_attention)},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_part_of_gemma_2_is_noticed(wrong, tmp_path):
    def describe(hf):
        made = gemma2(hf)
        return replace(made, **WRONG[wrong](made))

    with pytest.raises(AssertionError, match="Gemma 2: logits differ"):
        model_parity(CASES["gemma2"], tmp_path, DecoderFamily(describe)).check()


def test_gemma_3_with_one_rope_is_noticed(tmp_path):
    def describe(hf):
        made = gemma3_text(hf)
        return replace(made, attention=tuple(replace(one, rotary=made.attention[-1].rotary) for one in made.attention))

    with pytest.raises(AssertionError, match="Gemma 3, text: logits differ"):
        model_parity(CASES["gemma3_text"], tmp_path, DecoderFamily(describe)).check()


WRONG_IN_4 = {
    "values as they are": everywhere(value_norm=False),
    "scores by the size of a head": lambda made: {"softmax_scale": None},
    "norm weights about zero": lambda made: {"zero_centred_norms": True},
    "all pairs turned": lambda made: {"attention": tuple(
        replace(one, rotary=replace(one.rotary, fraction=1.0)) for one in made.attention)},
    "frequencies of the part that turns": lambda made: {"attention": tuple(
        replace(one, rotary=replace(one.rotary, scaling="default")) for one in made.attention)},
}


@pytest.mark.parametrize("wrong", WRONG_IN_4)
def test_a_wrong_part_of_gemma_4_is_noticed(wrong, tmp_path):
    def describe(hf):
        made = gemma4_text(hf)
        return replace(made, **WRONG_IN_4[wrong](made))

    with pytest.raises(AssertionError, match="Gemma 4, text: logits differ"):
        model_parity(CASES["gemma4_text"], tmp_path, DecoderFamily(describe)).check()


MATCHED = {
    "norms before exchanged": ("pre_feedforward_layernorm.weight", "pre_feedforward_layernorm_2.weight"),
    "norms after exchanged": ("post_feedforward_layernorm_1.weight", "post_feedforward_layernorm_2.weight"),
    "a norm of the router for that of the experts": ("router.scale", "pre_feedforward_layernorm_2.weight"),
}


@pytest.mark.parametrize("wrong", MATCHED)
def test_a_wrong_norm_beside_the_experts_is_noticed(wrong, tmp_path):
    """Two tensors under each other's names."""
    stems = [f"model.layers.{{layer}}.{name}" for name in MATCHED[wrong]]
    other = dict(zip(stems, stems[::-1], strict=True))

    def describe(hf):
        made = gemma4_text(hf)
        return replace(made, mlp=tuple(replace(one, hf=tuple(other.get(name, name) for name in one.hf))
                                       for one in made.mlp))

    with pytest.raises(AssertionError, match="with experts: logits differ"):
        model_parity(EXPERTS, tmp_path, DecoderFamily(describe)).check()


@pytest.mark.parametrize("method", ["gating", "routing"])
def test_a_router_without_norm_or_scales_is_noticed(method, tmp_path, monkeypatch):
    from megatron.core.transformer.moe.router import TopKRouter
    from miles_specs_gemma.side_by_side import NormedRouter

    monkeypatch.setattr(NormedRouter, method, getattr(TopKRouter, method))
    with pytest.raises(AssertionError, match="with experts: logits differ"):
        model_parity(EXPERTS, tmp_path).check()


def lent_by(layer):
    """In the place of the layer that lends to others with a window."""
    def change(made):
        shared = [replace(one, lends=number in (1, layer)) for number, one in enumerate(made.attention)]
        return {"attention": tuple(shared)}

    return change


def test_further_embeddings_do_not_need_shared_keys(tmp_path):
    model_parity(replace(PER_LAYER, config=PER_LAYER.config | {"num_kv_shared_layers": 0}), tmp_path).check()


WRONG_PER_LAYER = {
    "keys and values of a lower layer than the last": lent_by(0),
    "no further embedding": lambda made: {"beside_embedding": lambda *model: Plain(made.beside_embedding(*model))},
}


class Plain(torch.nn.Module):
    """Further embeddings that are what the projection makes of the first alone."""

    def __init__(self, inner):
        super().__init__()
        self.tokens, self.projection, self.norm, self.inner = inner.tokens, inner.projection, inner.norm, [inner]

    def forward(self, input_ids, embedded):
        return self.inner[0](torch.zeros_like(input_ids), embedded)


@pytest.mark.parametrize("wrong", WRONG_PER_LAYER)
def test_a_wrong_part_of_e2b_is_noticed(wrong, tmp_path):
    def describe(hf):
        made = gemma4_text(hf)
        return replace(made, **WRONG_PER_LAYER[wrong](made))

    with pytest.raises(AssertionError, match="embeddings for every layer: logits differ"):
        model_parity(PER_LAYER, tmp_path, DecoderFamily(describe)).check()


@pytest.mark.parametrize("change", [
    {"enable_moe_block": True, "hidden_size_per_layer_input": 8}, {"num_kv_shared_layers": 2}, {"attention_bias": True},
    {"num_kv_shared_layers": 4, "hidden_size_per_layer_input": 8},
    {"use_bidirectional_attention": "all"}, {"hidden_activation": "silu"}], ids=lambda change: next(iter(change)))
def test_variants_of_gemma_4_that_are_not_modelled_are_refused(change):
    from transformers import AutoConfig

    with pytest.raises(ConfigError) as caught:
        gemma4_text(AutoConfig.for_model("gemma4_text", **{**TINY, "hidden_size_per_layer_input": 0, **change}))
    assert caught.value.code == "architecture-variant-unsupported"
    assert caught.value.what.startswith(f"gemma4_text with {next(iter(change))}")


def test_heads_are_read_from_releases_of_transformers_without_configurations_of_layers():
    from transformers import AutoConfig

    hf = AutoConfig.for_model("gemma4_text", **{**TINY, **CASES["gemma4_text"].config})
    keys = {key: value for key, value in hf.to_dict().items() if key != "per_layer_config"}
    older = SimpleNamespace(**keys | {"num_key_value_heads": 4, "num_global_key_value_heads": 2, "head_dim": 32,
                                      "global_head_dim": 64})
    assert gemma4_text(older).attention == gemma4_text(hf).attention


@pytest.mark.parametrize("change", [{"attention_bias": True}, {"use_bidirectional_attention": True},
                                    {"hidden_activation": "silu"}, {"attn_logit_softcapping": 5.0}],
                         ids=lambda change: next(iter(change)))
def test_variants_that_are_not_modelled_are_refused(change):
    from transformers import AutoConfig

    with pytest.raises(ConfigError, match=f"gemma3_text with {next(iter(change))}"):
        gemma3_text(AutoConfig.for_model("gemma3_text", **{**TINY, **change}))
