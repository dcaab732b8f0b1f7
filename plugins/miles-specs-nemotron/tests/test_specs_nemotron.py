"""Random models of each variant in parity.toml against transformers: logits, gradients, names and bits."""

from pathlib import Path

import pytest
from miles_megatron.testing.parity import cases, model_parity


@pytest.mark.parametrize("case", cases(Path(__file__).with_name("parity.toml")), ids=str)
def test_a_family_is_hugging_faces(case, tmp_path):
    model_parity(case, tmp_path).check()
