"""Random models of each variant in parity.toml against transformers, and the variants that are refused."""

from pathlib import Path

import pytest
from miles_megatron.testing.parity import TINY, cases, model_parity
from miles_specs_llama.families import llama

from miles_core.errors import ConfigError


@pytest.mark.parametrize("case", cases(Path(__file__).with_name("parity.toml")), ids=str)
def test_a_family_is_hugging_faces(case, tmp_path):
    model_parity(case, tmp_path).check()


@pytest.mark.parametrize(("change", "words"), [
    ({"attention_bias": True}, "llama with attention_bias other than False"),
    ({"mlp_bias": True}, "llama with attention_bias other than True"),
    ({"hidden_act": "gelu"}, "llama with hidden_act other than 'silu'"),
    ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}, "rope_type other than"),
], ids=["attention bias alone", "MLP bias alone", "activation", "dynamic"])  # fmt: skip
def test_variants_that_are_not_modelled_are_refused(change, words):
    from transformers import AutoConfig

    with pytest.raises(ConfigError, match=words):
        llama(AutoConfig.for_model("llama", **{**TINY, **change}))
