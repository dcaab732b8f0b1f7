"""Plans the launch scripts of scripts.json, each with a config.json of its model's shape (models.json) and no weights."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
QUANTIZED = {
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "int4": {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": {"group_size": 32, "num_bits": 4, "strategy": "group", "symmetric": True, "type": "int"}}}},
}
"""What config.json says of rounded weights."""


def scripts() -> Iterator[tuple[str, str, list[str]]]:
    """(repository, path, words) of every launch script; the first word is train.py or train_async.py."""
    for repository, entry in json.loads((HERE / "scripts.json").read_text(encoding="utf-8")).items():
        for path, words in entry["scripts"].items():
            yield repository, path, shlex.split(words)


def commits() -> dict[str, str]:
    """Repository -> the commit whose scripts these are."""
    return {repository: entry["commit"] for repository, entry in json.loads((HERE / "scripts.json").read_text(encoding="utf-8")).items()}


def configuration(name: str) -> dict:
    """config.json of a model; of the longest name in models.json that a folder's name begins with."""
    models = json.loads((HERE / "models.json").read_text(encoding="utf-8"))
    known = max((model for model in models if name.lower().startswith(model.lower())), key=len)
    said = _whole(models, models[known])
    rounded = said.pop("quantized", None)
    rounded = "int4" if "int4" in name.lower() else "fp8" if "fp8" in name.lower() else None if name.endswith("-bf16") else rounded
    return said | ({"quantization_config": QUANTIZED[rounded]} if rounded else {})


def _whole(models: dict, said: dict) -> dict:
    whole = _whole(models, models[said["like"]]) if "like" in said else {}
    whole |= {key: value for key, value in said.items() if key != "like"}
    return whole | ({"text_config": _whole(models, said["text_config"])} if "text_config" in said else {})
