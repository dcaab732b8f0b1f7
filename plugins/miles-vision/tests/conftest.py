"""Tiny random models that read images."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from miles_testing import tiny_checkpoint

sys.path.insert(0, str(Path(__file__).parent))  # pictures.py


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """model_type -> a directory with a tiny random model, its processor's files and train.jsonl."""
    import torch
    from pictures import MODELS, TEMPLATE, rows
    from tokenizers import Tokenizer
    from transformers import AutoConfig, AutoModelForImageTextToText

    def made(kind):
        folder = tmp_path_factory.mktemp(kind)
        shutil.copytree(tiny_checkpoint(), folder, dirs_exist_ok=True,
                        ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.add_special_tokens(["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"])
        tokenizer.save(str(folder / "tokenizer.json"))
        said = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(said | {"chat_template": TEMPLATE}))
        torch.manual_seed(0)
        AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **MODELS[kind])).save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(dict(
            image_processor_type="Qwen2VLImageProcessor", patch_size=4, merge_size=2, temporal_patch_size=2,
            min_pixels=64, max_pixels=1024, image_mean=[0.5] * 3, image_std=[0.5] * 3)))
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(folder)))
        return folder

    cache = {}
    return lambda kind: cache.setdefault(kind, None) or cache.update({kind: made(kind)}) or cache[kind]
