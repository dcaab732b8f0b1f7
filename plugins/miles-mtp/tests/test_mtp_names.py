"""Names of tensors against those of published checkpoints; what a folder has; what is refused."""

import json
from dataclasses import replace

import pytest
import torch
from miles_megatron.specs import Rule, WeightMap
from miles_mtp.names import SCHEMES, Layers, layers_of
from miles_mtp.plugin import Mtp, MtpOptions
from safetensors.torch import save_file

from miles_core.config.load import with_values
from miles_core.config.tables import RunConfig
from miles_core.errors import ConfigError

MODEL = WeightMap((
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),
    Rule("decoder.layers.{layer}.mlp.linear_fc2.weight", ("model.layers.{layer}.mlp.down_proj.weight",), layers=(0,)),
    Rule("decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc2.weight",
         ("model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",), "same", (1, 2), 4),
    Rule("decoder.layers.{layer}.self_attention.linear_proj.weight", ("model.layers.{layer}.self_attn.o_proj.weight",),
         layers=(0, 1, 2)),
), heads=4, groups=2, head_dim=8)  # fmt: skip
LEFT = replace(MODEL, left=("model.layers.3.",), left_counts=("num_nextn_predict_layers",))

PUBLISHED = {
    # Qwen/Qwen3-Next-80B-A3B-Instruct
    "mtp": ("mtp.fc.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight",
            "mtp.layers.0.self_attn.o_proj.weight", "mtp.layers.0.mlp.experts.{expert}.down_proj.weight"),
    # deepseek-ai/DeepSeek-V3: layer 61 of 61; here layers 3 and 4 of 3
    "nextn": tuple(f"model.layers.{n}.{rest}" for n in (3, 4) for rest in (
        "eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight", "self_attn.o_proj.weight",
        "mlp.experts.{expert}.down_proj.weight")),
    # XiaomiMiMo/MiMo-7B-RL
    "mimo": tuple(f"model.mtp_layers.{k}.{rest}" for k in (0, 1) for rest in (
        "input_proj.weight", "token_layernorm.weight", "hidden_layernorm.weight", "final_layernorm.weight",
        "self_attn.o_proj.weight", "mlp.experts.{expert}.down_proj.weight")),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """(*names) -> a Hugging Face directory of a model of three layers with tensors of these names."""

    def make(*names):
        (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 3}))
        save_file({name: torch.zeros(1) for name in ("model.norm.weight", *names)}, tmp_path / "model.safetensors")
        return tmp_path

    return make


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_names_are_the_published_ones(scheme, folder):
    """The layers are made like the model's last one; all their tensors may be missing; the folder is recognised."""
    count = 1 if scheme == "mtp" else 2
    added = SCHEMES[scheme].rules(MODEL, count)
    assert sorted(name for rule in added for name in rule.hf) == sorted(PUBLISHED[scheme])
    assert all(rule.optional and rule.layers is None for rule in added)
    experts = next(rule for rule in added if "experts" in rule.megatron)
    assert experts.megatron == "mtp.layers.0.transformer_layer.mlp.experts.local_experts.{expert}.linear_fc2.weight"
    assert experts.experts == 4
    found = layers_of(folder(*PUBLISHED[scheme]), None, "auto")
    assert (found.count, found.scheme, found.stored) == (count, scheme, True)


def test_which_input_is_normed_by_what():
    """Megatron's eh_proj takes (enorm(embedding), hnorm(hidden state)); MiMo's takes the hidden state first."""
    for scheme, first in (("mtp", "mtp.pre_fc_norm_embedding.weight"), ("nextn", "model.layers.3.enorm.weight"),
                          ("mimo", "model.mtp_layers.0.hidden_layernorm.weight")):
        rules = {rule.megatron: rule.hf for rule in SCHEMES[scheme].rules(MODEL, 1)}
        assert rules["mtp.layers.0.enorm.weight"] == (first,)
    assert SCHEMES["mimo"].hidden_first and not SCHEMES["mtp"].hidden_first


def test_copies_of_embedding_and_head_are_left_alone():
    assert Layers(2, "nextn", True).added(MODEL).ignored == {
        f"model.layers.{n}.{rest}.weight" for n in (3, 4) for rest in ("embed_tokens", "shared_head.head")}
    assert not Layers(1, "mtp", True).added(MODEL).ignored


def test_fresh_layers_have_names_that_a_draft_reads(folder):
    nothing = folder()
    assert [(one.count, one.scheme, one.stored) for one in (
        layers_of(nothing, None, "auto"), layers_of(nothing, 2, "auto"), layers_of(nothing, 1, "mimo"))
    ] == [(1, "mtp", False), (2, "nextn", False), (1, "mimo", False)]


def test_what_the_checkpoint_contradicts_is_refused(folder):
    there = folder(*PUBLISHED["nextn"])
    with pytest.raises(ConfigError, match=r"number of multi-token-prediction layers \(got 2\)"):
        layers_of(there, 1, "auto")
    with pytest.raises(ConfigError, match=r"\(got nextn\)"):
        layers_of(there, None, "mtp")
    with pytest.raises(ConfigError, match=r"mtp\.\* are for one layer"):
        layers_of(folder(), 2, "mtp")


@pytest.mark.parametrize(("options", "said"), [
    ({"num_layers": 0}, "at least one layer"),
    ({"loss_scaling_factor": -1.0}, "should not be negative"),
])  # fmt: skip
def test_options_that_cannot_be_meant_are_refused(options, said):
    config = replace(with_values(RunConfig(), "test"), surfaces={"megatron": {}})
    with pytest.raises(ConfigError, match=said):
        Mtp(MtpOptions(**options), config)


@pytest.mark.parametrize("scheme", ["mtp", "nextn"])
def test_an_export_with_the_layers_counts_them_by_whatever_names(tmp_path, scheme):
    """add-mtp gives DeepSeek-V3 other names than its release has, of which the family says that they stay behind."""
    from miles_megatron.weights import export_keys

    (tmp_path / "config.json").write_text(json.dumps({"num_nextn_predict_layers": 1}))
    assert export_keys(tmp_path, LEFT)["num_nextn_predict_layers"] == 0
    assert "num_nextn_predict_layers" not in export_keys(tmp_path, Layers(1, scheme, True).added(LEFT))


@pytest.mark.parametrize(("known", "key"), [
    ({}, "num_nextn_predict_layers"), ({"mtp_num_hidden_layers": 0}, "mtp_num_hidden_layers")])
def test_an_export_of_fresh_layers_counts_them(folder, known, key):
    """A loader that finds no number, or 0, has no place for the layers and ignores their tensors."""
    from miles_megatron.weights import export_keys

    plain = folder()
    (plain / "config.json").write_text(json.dumps({"text_config": {"num_hidden_layers": 3, **known}}))
    keys = export_keys(plain, layers_of(plain, 2, "auto").added(LEFT))
    assert keys["text_config"] == {"num_hidden_layers": 3, key: 2}
