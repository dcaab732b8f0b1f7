"""Random models of each variant in parity.toml against transformers: logits, gradients, names and bits."""

from dataclasses import replace
from pathlib import Path

import pytest
from miles_megatron.decoder import DecoderFamily
from miles_megatron.testing.parity import TINY, cases, model_parity
from miles_specs_exaone.families import exaone4
from transformers import AutoConfig

from miles_core.errors import ConfigError

CASES = cases(Path(__file__).with_name("parity.toml"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_family_is_hugging_faces(case, tmp_path):
    model_parity(case, tmp_path).check()


@pytest.mark.parametrize("wrong", ["rotary", "window"])
def test_layers_that_are_all_alike_are_noticed(wrong, tmp_path):
    """A rope in the layers without one, and no windows."""
    def spoilt(hf):
        decoder = exaone4(hf)
        value = decoder.attention[0].rotary if wrong == "rotary" else None
        return replace(decoder, attention=tuple(replace(one, **{wrong: value}) for one in decoder.attention))

    with pytest.raises(AssertionError, match="logits differ"):
        model_parity(CASES[0], tmp_path, DecoderFamily(spoilt)).check()


@pytest.mark.parametrize("change", [{"hidden_act": "gelu"}, {"attention_bias": True}, {"mlp_bias": True}], ids=str)
def test_what_is_not_modelled_is_refused(change):
    with pytest.raises(ConfigError) as refused:
        exaone4(AutoConfig.for_model("exaone4", **TINY | change))
    assert refused.value.code == "architecture-variant-unsupported"
