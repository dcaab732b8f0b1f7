"""Random models of each case in parity.toml against transformers: logits, gradients, names and bits.

On one rank; for two, and the row of a table: python -m miles_megatron.testing.parity tests/parity.toml
"""

from pathlib import Path

import pytest
from miles_core.errors import ConfigError
from miles_megatron.decoder import DecoderFamily
from miles_megatron.testing.parity import TINY, cases, model_parity
from transformers import AutoConfig

from {{ cookiecutter.__package }}.families import decoder


@pytest.mark.parametrize("case", cases(Path(__file__).with_name("parity.toml")), ids=str)
def test_the_family_is_hugging_faces(case, tmp_path):
    model_parity(case, tmp_path, DecoderFamily(decoder)).check()


@pytest.mark.parametrize("change", [{"hidden_act": "gelu"}], ids=str)  # one for each key that families.py refuses
def test_what_is_not_modelled_is_refused(change):
    with pytest.raises(ConfigError) as refused:
        decoder(AutoConfig.for_model("{{ cookiecutter.family }}", **TINY | change))
    assert refused.value.code == "architecture-variant-unsupported"
