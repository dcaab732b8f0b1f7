"""What the start reads of a checkpoint: the context of a text model inside another, a tokenizer of a model unknown."""

import json
import shutil
from pathlib import Path

import pytest

from miles_core.build import load_tokenizer, with_context
from miles_core.config.load import config_json, with_values
from miles_core.config.tables import RunConfig
from miles_core.errors import CheckpointError

TOKENIZER = Path(__file__).parents[2] / "examples" / "arithmetic" / "tiny-qwen3"


@pytest.fixture
def config(tmp_path):
    """(keys of config.json) -> a run on it, with the tokenizer of the tiny examples."""
    def make(**keys):
        for file in TOKENIZER.glob("*token*"):
            shutil.copy(file, tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(keys))
        return with_values(RunConfig(), "test", checkpoint__hf_checkpoint=str(tmp_path))

    return make


def test_a_text_model_inside_another_says_how_long_a_context_is(config):
    """What both say is the larger model's, which config.json is of."""
    inner = {"model_type": "inner", "max_position_embeddings": 77, "vocab_size": 5}
    made = config(model_type="outer", text_config=inner)
    assert with_context(made).rollout.rollout_max_context_len == 77
    keys = config_json(made)[1]
    assert (keys["model_type"], keys["vocab_size"]) == ("outer", 5)


def test_a_context_that_config_json_leaves_out_is_transformers_own(config):
    """As Gemma 3's of 4B and more does."""
    made = config(model_type="gemma3", text_config={"model_type": "gemma3_text", "hidden_size": 64})
    assert with_context(made).rollout.rollout_max_context_len == 131072
    with pytest.raises(CheckpointError) as caught:
        with_context(config(model_type="unknown"))
    assert caught.value.code == "model-config-unusable"


@pytest.mark.parametrize("text", [None, "x", [1]])
def test_a_text_config_of_no_kind_is_no_crash(config, text):
    keys = config_json(config(model_type="outer", text_config=text))[1]
    assert keys is None or keys["model_type"] == "outer"


def test_a_tokenizer_wants_no_model_that_transformers_knows(config):
    """And runs no code of the checkpoint."""
    tokens = [load_tokenizer(config(model_type=name, auto_map={"AutoConfig": "own.OwnConfig"}))("1+1=")["input_ids"]
              for name in ("own", "qwen3")]
    assert tokens[0] == tokens[1] != []
