"""Repairs of releases of transformers: each is needed, and does what it says."""

import pytest
import torch
import transformers
from miles_local import repairs  # noqa: F401 - for its effect
from packaging.version import Version
from transformers import AutoModelForImageTextToText, Llama4Config
from transformers.modeling_outputs import MoeCausalLMOutputWithPast


@pytest.fixture
def llama4():
    """Llama 4 with a vision model, which stays unused."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return AutoModelForImageTextToText.from_config(Llama4Config(
        text_config={**sizes, "vocab_size": 40, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 2,
                     "intermediate_size_mlp": 32, "max_position_embeddings": 64, "pad_token_id": 0},
        vision_config={**sizes, "image_size": 28, "patch_size": 14, "projector_input_dim": 32,
                       "projector_output_dim": 32, "vision_output_dim": 32}), attn_implementation="eager")


def test_llama4_answers_tokens_alone(llama4, monkeypatch):
    ids = torch.arange(7)[None]
    assert llama4(input_ids=ids).logits.shape == (1, 7, 40)
    if Version(transformers.__version__) >= Version("5.24"):
        monkeypatch.delattr(MoeCausalLMOutputWithPast, "image_outputs")
        with pytest.raises(AttributeError, match="image_outputs"):
            llama4(input_ids=ids)
