"""What a plan knows of FP8 checkpoints and kernels before anything starts; the trainer's start refuses."""

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


def planned(*flags):
    prepare(ROOT / "examples" / "moe.toml", ["--plugin", "fp8", *map(str, flags)])


@pytest.fixture
def checkpoint(tmp_path):
    """Keys of quantization_config -> a folder that says so."""
    def write(**change):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TINY / name, tmp_path)
        quantised = {key: value for key, value in {**USUAL, **change}.items() if value is not None}
        whole = json.loads((TINY / "config.json").read_text()) | {"quantization_config": quantised}
        (tmp_path / "config.json").write_text(json.dumps(whole))
        return tmp_path

    return write


@pytest.mark.parametrize(("change", "flags"), [({}, SGLANG), ({}, ()), ({"weight_block_size": None}, ())], ids=str)
def test_kinds_of_checkpoints(checkpoint, change, flags):
    planned("--hf-checkpoint", checkpoint(**change), "--ref-load", TINY, *flags)


@pytest.mark.parametrize("flags", [SGLANG, (), ("--debug-rollout-only", "--plan-without-weights")], ids=str)
@pytest.mark.parametrize("change", [{"quant_method": "modelopt", "quant_algo": "FP8"}, {"activation_scheme": "static"}],
                         ids=str)
def test_a_format_that_no_sync_writes_ends_the_plan(checkpoint, change, flags):
    """Engines read it, so the first sync would have said so, after all of the start."""
    folder = checkpoint(**change)
    with pytest.raises(ConfigError) as caught:
        planned("--hf-checkpoint", folder, "--ref-load", TINY, *flags)
    assert caught.value.code == "fp8-format-unsupported" and caught.value.got == change
    planned("--hf-checkpoint", folder, "--debug-rollout-only", "--plan-without-weights", *SGLANG)


@pytest.mark.parametrize("flags", [
    ("--fp8-recipe", "delayed", *SGLANG), ("--fp8-format", "e4m3", *SGLANG), ("--fp8-format", "e4m3", "--no-bf16"),
], ids=str)
def test_kernels(flags):
    planned("--hf-checkpoint", TINY, *flags)
