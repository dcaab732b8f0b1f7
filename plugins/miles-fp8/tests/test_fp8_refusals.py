"""What a plan knows of FP8 checkpoints and kernels before anything starts."""

import json
import shutil
from pathlib import Path

import pytest

from miles_core.errors import ConfigError
from miles_core.plugins.plan import prepare

ROOT = Path(__file__).parents[3]
TINY = ROOT / "examples" / "arithmetic" / "tiny-qwen3-moe-128"
SGLANG = ("--engine", "sglang", "--bf16")
USUAL = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def said(flags, words):
    if words is None:
        prepare(ROOT / "examples" / "moe.toml", ["--plugin", "fp8", *map(str, flags)])
    else:
        with pytest.raises(ConfigError, match=words):
            prepare(ROOT / "examples" / "moe.toml", ["--plugin", "fp8", *map(str, flags)])


@pytest.mark.parametrize(("change", "flags", "words"), [
    ({}, SGLANG, None), ({}, (), None), ({"activation_scheme": "static"}, SGLANG, "fixed scales"),
    ({"fmt": "e5m2"}, SGLANG, "format is not e4m3"), ({"weight_block_size": None}, SGLANG, "with one scale each"),
    ({"weight_block_size": None}, (), None), ({"weight_block_size": 128}, SGLANG, "the rows and the columns"),
    ({"weight_block_size": [1, 128, 128]}, SGLANG, "the rows and the columns"),
    ({"weight_block_size": ["128", "128"]}, SGLANG, "is two numbers"),
    ({"quant_method": "FP8"}, SGLANG, "written small"),
], ids=str)
def test_kinds_of_checkpoints(tmp_path, change, flags, words):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, tmp_path)
    quantised = {key: value for key, value in {**USUAL, **change}.items() if value is not None}
    whole = json.loads((TINY / "config.json").read_text()) | {"quantization_config": quantised}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    said(["--hf-checkpoint", tmp_path, "--ref-load", TINY, *flags], words)


@pytest.mark.parametrize(("flags", "words"), [
    (("--fp8-format", "e4m3", "--fp8-param-gather", *SGLANG), "cannot be streamed to engines"),
    (("--fp8-recipe", "delayed", "--transformer-impl", "local"), "Transformer Engine's kernels alone"),
    (("--fp8-recipe", "delayed", *SGLANG), None), (("--fp8-format", "e4m3", *SGLANG), None),
    (("--fp8-format", "e4m3", "--no-bf16", "--engine", "sglang"), "FP8 kernels train in bfloat16"),
    (("--fp8-format", "e4m3", "--no-bf16"), None),
], ids=str)
def test_kernels(flags, words):
    said(["--hf-checkpoint", TINY, *flags], words)
