"""Tiny random models that read images."""

from __future__ import annotations

import functools
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
    from pictures import ALONE, MODELS, PROCESSORS, QWENS, SETTINGS, SPELLINGS, TEMPLATE, WORDS, rows
    from tokenizers import Tokenizer
    from transformers import AutoConfig, AutoModelForImageTextToText

    def made(kind):
        folder = tmp_path_factory.mktemp(kind)
        shutil.copytree(tiny_checkpoint(), folder, dirs_exist_ok=True,
                        ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.add_special_tokens([*WORDS.get(kind, QWENS)])
        tokenizer.save(str(folder / "tokenizer.json"))
        said = json.loads((folder / "tokenizer_config.json").read_text())
        whole = QWENS[0] + QWENS[2] + QWENS[1]
        template = TEMPLATE.replace(whole, ALONE.get(kind, whole))
        said |= {"chat_template": template, **SPELLINGS.get(kind, {})}
        (folder / "tokenizer_config.json").write_text(json.dumps(said))
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **MODELS[kind]))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1 and not parameter.any():  # Gemma 3's way from tower to text begins as zeros
                    parameter.normal_(0, 0.3)
        model.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[kind]))
        if kind in SETTINGS:
            (folder / "processor_config.json").write_text(json.dumps(SETTINGS[kind]))
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(folder)))
        return folder

    return functools.cache(made)
