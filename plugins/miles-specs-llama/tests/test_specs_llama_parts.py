"""Every part in which these families depart from Llama is seen by the parity kit: with one wrong, it says so."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from miles_megatron.decoder import DecoderFamily
from miles_megatron.testing.parity import TINY, cases, model_parity
from miles_specs_llama import families, llama4, mistral
from safetensors.torch import save_file

from miles_core.errors import ConfigError

FAMILIES = {**vars(families), **vars(llama4), **vars(mistral)}
CASES = {case.name: case for case in cases(Path(__file__).with_name("parity.toml"))}


def everywhere(**changes):
    return lambda made: {"attention": tuple(replace(one, **changes) for one in made.attention)}


def mixers(**changes):
    return lambda made: {"attention": tuple(replace(one, mixer=replace(one.mixer, **changes))
                                            for one in made.attention)}


def ropes(made, among):
    """The rope of one layer in all that `among` chooses."""
    rope = next(one.rotary for one in made.attention if one.rotary is not None)
    return {"attention": tuple(replace(one, rotary=rope if among(one) else one.rotary) for one in made.attention)}


WRONG = {
    "a rope in every layer": ("SmolLM3", lambda made: ropes(made, lambda one: one.rotary is None)),
    "no window where there is no rope": ("SmolLM3 with windows", everywhere(window=None)),
    "an embedding as it is": ("Granite 3", lambda made: {"embedding_scale": 1.0}),
    "outputs as they are": ("Granite 3", lambda made: {"residual_scale": 1.0}),
    "scores by the size of a head": ("Granite 3", lambda made: {"softmax_scale": None}),
    "logits as they are": ("Granite 3", lambda made: {"logit_scale": 1.0}),
    "a rope on whole heads": ("Phi-3 with windows", lambda made: everywhere(
        rotary=replace(made.attention[0].rotary, fraction=1.0))(made)),
    "windows in the other layers": ("OLMo 3", lambda made: {"attention": made.attention[::-1]}),
    "one rope for all layers": ("OLMo 3, longer context", lambda made: ropes(made, lambda one: True)),
    "attention beyond the chunk": ("Llama 4, text", mixers(chunk=None)),
    "a window in the place of chunks": ("Llama 4, text", lambda made: {"attention": tuple(
        replace(one, mixer=None, window=one.mixer.chunk) for one in made.attention)}),
    "queries and keys as they are": ("Llama 4, text", mixers(epsilon=None)),
    "queries no warmer": ("Llama 4, text", everywhere(warming=None)),
    "queries of latents no warmer": ("Mistral Small 4", everywhere(warming=None)),
    "queries warmer by one position": ("Ministral 3", lambda made: everywhere(
        warming=replace(made.attention[0].warming, first=1))(made)),
    "windows in every layer": ("Ministral", everywhere(window=24)),
    "the layers' windows": ("Ministral", everywhere(window=None)),
    "scores on what experts give": ("Llama 4, text", lambda made: {
        "constants": {**made.constants, "moe_apply_probs_on_input": False}}),
}


@pytest.mark.full
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_part_is_noticed(wrong, tmp_path):
    name, change = WRONG[wrong]
    family = FAMILIES[CASES[name].family]

    def describe(hf):
        made = family(hf)
        return replace(made, **change(made))

    with pytest.raises(AssertionError, match=f"{name}: logits differ"):
        model_parity(CASES[name], tmp_path, DecoderFamily(describe)).check()


@pytest.mark.parametrize(("family", "change"), [
    ("smollm3", {"attention_bias": True}), ("granite", {"mlp_bias": True}), ("phi3", {"hidden_act": "gelu"}),
    ("phi3", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8,
                                  "long_factor": [4.0] * 8}}),
    ("olmo2", {"attention_bias": True}), ("olmo3", {"hidden_act": "gelu"}),
    ("llama4_text", {"num_experts_per_tok": 2}), ("mistral4", {"n_group": 2}), ("mistral", {"hidden_act": "gelu"}),
    ("ministral", {"hidden_act": "gelu"}),
], ids=lambda value: value if isinstance(value, str) else next(iter(value)))  # fmt: skip
def test_variants_that_are_not_modelled_are_refused(family, change):
    from transformers import AutoConfig

    with pytest.raises(ConfigError) as caught:
        FAMILIES[family](AutoConfig.for_model(family, **{**TINY, **change}))
    assert caught.value.code == "architecture-variant-unsupported" and family in str(caught.value)


@pytest.mark.parametrize("name", ["OLMo 3", "OLMo 3, longer context"])
def test_an_older_transformers_reads_the_same_olmo_3(name):
    """Before 5.13 it has one rope, which is that of the layers without a window."""
    from transformers import AutoConfig

    case = CASES[name]
    hf, before = (AutoConfig.for_model("olmo3", **{**TINY, **case.config}) for _ in range(2))
    before.rope_parameters = before.rope_parameters["full_attention"]
    assert families.olmo3(before).spec() == families.olmo3(hf).spec()


def test_megatrons_option_for_layers_without_a_rope_may_be_repeated():
    from transformers import AutoConfig

    spec = families.smollm3(AutoConfig.for_model("smollm3", **TINY)).spec()
    assert [one.rotary is None for one in spec.attention] == [False, False, False, True]
    assert spec.also["no_rope_freq"] == (4, [0, 0, 0, 1])


def test_another_text_model_inside_mistral3_is_refused():
    from transformers import AutoConfig

    with pytest.raises(ConfigError) as caught:
        mistral.mistral3(AutoConfig.for_model("mistral3", text_config={"model_type": "gemma2"}))
    assert caught.value.code == "architecture-variant-unsupported" and caught.value.got == "gemma2"


@pytest.mark.parametrize(("text", "head", "tied"), [(False, True, False), (False, False, True), (True, True, True)])
def test_an_output_layer_in_the_files_decides_where_mistral3_is_silent(text, head, tied, tmp_path):
    """transformers takes a config.json that says nothing of tied embeddings for one of tied ones."""
    from transformers import AutoConfig

    inside = {**TINY, "model_type": "mistral", "tie_word_embeddings": text}
    config = AutoConfig.for_model("mistral3", text_config=inside)
    config._name_or_path = str(tmp_path)
    names = ["language_model.model.embed_tokens.weight", *["language_model.lm_head.weight"] * head]
    save_file({name: torch.zeros(2) for name in names}, tmp_path / "model.safetensors")
    assert config.tie_word_embeddings and mistral.mistral3(config).weight_map().tied == tied
