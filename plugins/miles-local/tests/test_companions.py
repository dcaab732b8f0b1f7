"""What lies beside the weights of a directory that is written."""

from __future__ import annotations

import json

import pytest
import torch
from miles_local.companions import copy_companions


@pytest.mark.parametrize("more", [None, {"quantization_config": None, "text_config": {"dtype": "bfloat16", "own": 1}}])
def test_the_text_of_a_larger_model_says_the_dtype_of_its_weights(tmp_path, more):
    """transformers loads it alone by what its part says, and would round files in float32."""
    source, target = tmp_path / "model", tmp_path / "out"
    constants = {"dtype": "bfloat16", "text_config": {"dtype": "bfloat16", "own": 1},
                 "vision_config": {"dtype": "bfloat16"}}
    for folder in (source, target):
        folder.mkdir()
    (source / "config.json").write_text(json.dumps(constants))
    copy_companions(source, target, torch.float32, more)
    assert json.loads((target / "config.json").read_text()) == constants | {
        "dtype": "float32", "text_config": {"dtype": "float32", "own": 1}}


def test_a_tokenizer_keeps_all_of_its_chat_templates(tmp_path):
    from miles_testing.tiny import tiny_checkpoint
    from transformers import AutoTokenizer

    source, target = tiny_checkpoint(tmp_path / "model"), tmp_path / "out"
    target.mkdir()
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": "{{ messages }}"}
    tokenizer.save_pretrained(source)
    (source / "original").mkdir()
    copy_companions(source, target, torch.float32)
    assert AutoTokenizer.from_pretrained(target).chat_template == tokenizer.chat_template
    assert not (target / "original").exists()
