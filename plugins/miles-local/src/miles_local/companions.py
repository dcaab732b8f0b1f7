"""What a Hugging Face directory holds beside the weights, for directories that trainers and conversions write."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from miles_core.errors import CheckpointError
from miles_core.reading import parse_json, reading

WEIGHT_FILES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5",
                ".ckpt", ".msgpack", ".ot", ".onnx")

OF_QUANTISED = "hf_quant_config.json"
"""What ModelOpt says of quantised weights; engines believe it where config.json says nothing."""
TEMPLATES = "additional_chat_templates"
"""Where transformers keeps a tokenizer's chat templates but for the one that is called default."""


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
    if (source / TEMPLATES).is_dir():
        shutil.copytree(source / TEMPLATES, target / TEMPLATES, copy_function=shutil.copyfile)
    with reading(str(source / "config.json"), CheckpointError):
        config: dict[str, Any] = dict(parse_json((target / "config.json").read_text(encoding="utf-8")))
    config |= more or {}
    config = {key: value for key, value in config.items() if value is not None or key not in (more or {})}
    text, name = config.get("text_config"), str(dtype).removeprefix("torch.")
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = name
    if isinstance(text, dict):  # who loads the text model alone goes by its own
        config["text_config"] = text | {key: name for key in ("dtype", "torch_dtype") if text.get(key) is not None}
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
