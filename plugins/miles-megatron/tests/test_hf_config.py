"""config.json of architectures that transformers knows and does not know."""

import json

import pytest
from miles_megatron.hf_config import Unread, read, read_as

KEYS = {"num_hidden_layers": 2, "hidden_size": 64, "rope_theta": 5e4, "torch_dtype": "bfloat16",
        "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}, "architectures": ["OwnForCausalLM"]}


def written(folder, **more):
    (folder / "config.json").write_text(json.dumps(KEYS | more))
    return folder


def test_a_known_one_is_transformers_own(tmp_path):
    hf = read(written(tmp_path, model_type="qwen2"))
    assert hf.model_type == "qwen2" and read_as(hf, "llama") is hf


def test_an_unknown_one_is_read_as_the_family_says(tmp_path):
    """And runs no code of the checkpoint."""
    hf = read(written(tmp_path, model_type="own"))
    assert isinstance(hf, Unread) and hf.model_type == "own"
    like = read_as(hf, "qwen2")
    assert (like.model_type, like.hidden_size, like.rope_parameters["rope_theta"]) == ("qwen2", 64, 5e4)
    assert like._name_or_path == str(tmp_path)


@pytest.mark.parametrize("text", ['{"hidden_size": 1}', "[1"])
def test_what_is_no_configuration_is_an_error(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises((KeyError, ValueError)):
        read(tmp_path)
