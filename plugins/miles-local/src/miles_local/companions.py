"""What a Hugging Face directory holds beside the weights, for directories that trainers and conversions write."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from miles_core.errors import CheckpointError
from miles_core.reading import parse_json, reading

WEIGHT_FILES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5",
                ".ckpt", ".msgpack", ".ot", ".onnx")

OF_QUANTISED = "hf_quant_config.json"
"""What ModelOpt says of quantised weights; engines believe it where config.json says nothing."""


def copy_companions(source: Path, target: Path, dtype: torch.dtype, more: Mapping[str, object] | None = None) -> None:
    """Copy it; config.json with the dtype of the new weights, and with `more`, in which None takes a key out.

    Raises:
        CheckpointError: config.json cannot be read.
    """
    plain = "quantization_config" in (more or {}) and more["quantization_config"] is None
    for file in sorted(source.iterdir()):
        if (file.is_file() and not file.name.endswith(WEIGHT_FILES) and not file.name.startswith(".")
                and not (plain and file.name == OF_QUANTISED)):
            shutil.copyfile(file, target / file.name)
    with reading(str(source / "config.json"), CheckpointError):
        config = dict(parse_json((target / "config.json").read_text(encoding="utf-8")))
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
    config |= more or {}
    config = {key: value for key, value in config.items() if value is not None or key not in (more or {})}
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
