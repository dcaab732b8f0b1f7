"""Random models of each variant in parity.toml against transformers: logits, gradients, names and bits."""

from pathlib import Path

import pytest
from miles_megatron.testing.parity import cases, model_parity


@pytest.mark.parametrize("case", cases(Path(__file__).with_name("parity.toml")), ids=str)
def test_a_family_is_hugging_faces(case, tmp_path):
    model_parity(case, tmp_path).check()


def test_a_config_that_says_nothing_of_axes_has_those_of_transformers_module():
    from miles_specs_qwen2.families import qwen2_5_vl
    from transformers import Qwen2_5_VLConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding

    config = Qwen2_5_VLConfig()
    config.text_config.rope_parameters.pop("mrope_section", None)
    axes = qwen2_5_vl(config).attention[0].rotary.axes
    assert [axes.count(axis) for axis in range(3)] == Qwen2_5_VLRotaryEmbedding(config.text_config).mrope_section
    assert list(axes) == sorted(axes)


def test_qwen3_vl_has_those_of_transformers_module_in_turns():
    from miles_specs_qwen2.families import qwen3_vl
    from transformers import Qwen3VLConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

    config = Qwen3VLConfig()
    config.text_config.rope_parameters.pop("mrope_section", None)
    axes = qwen3_vl(config).attention[0].rotary.axes
    assert [axes.count(axis) for axis in range(3)] == Qwen3VLTextRotaryEmbedding(config.text_config).mrope_section
    assert axes[:3] == (0, 1, 2)
