"""What a plan knows of FP8 checkpoints and kernels before anything starts; the trainer's start refuses."""

import json
import shutil
from pathlib import Path

import pytest

from miles_core.plugins.plan import prepare

ROOT = Path(__file__).parents[3]
TINY = ROOT / "examples" / "arithmetic" / "tiny-qwen3-moe-128"
SGLANG = ("--engine", "sglang", "--bf16")
USUAL = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def planned(*flags):
    prepare(ROOT / "examples" / "moe.toml", ["--plugin", "fp8", *map(str, flags)])


@pytest.mark.parametrize(("change", "flags"), [({}, SGLANG), ({}, ()), ({"weight_block_size": None}, ())], ids=str)
def test_kinds_of_checkpoints(tmp_path, change, flags):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, tmp_path)
    quantised = {key: value for key, value in {**USUAL, **change}.items() if value is not None}
    whole = json.loads((TINY / "config.json").read_text()) | {"quantization_config": quantised}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    planned("--hf-checkpoint", tmp_path, "--ref-load", TINY, *flags)


@pytest.mark.parametrize("flags", [
    ("--fp8-recipe", "delayed", *SGLANG), ("--fp8-format", "e4m3", *SGLANG), ("--fp8-format", "e4m3", "--no-bf16"),
], ids=str)
def test_kernels(flags):
    planned("--hf-checkpoint", TINY, *flags)
