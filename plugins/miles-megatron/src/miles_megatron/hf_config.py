"""config.json as transformers reads it, and as it stands where transformers does not know the architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core.reading import parse_json

_OF_THE_FILE = frozenset({"model_type", "architectures", "auto_map", "quantization_config", "transformers_version"})
"""Keys that say nothing of the model's shape."""


@dataclass(frozen=True, slots=True)
class Unread:
    """A config.json of a model_type that transformers does not have; a family reads it with `read_as`.

    Args:
        keys: what it has.
        _name_or_path: the folder, under transformers' name for it.
    """

    keys: Mapping[str, Any]
    model_type: str
    _name_or_path: str


def read(folder: Path) -> Any:
    """The configuration of a Hugging Face directory. Code that comes with a checkpoint is not run.

    Raises:
        OSError: no config.json.
        ValueError, KeyError: it cannot be read, or has no model_type.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    keys = parse_json((folder / "config.json").read_text(encoding="utf-8"))
    if keys["model_type"] in CONFIG_MAPPING:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    return Unread(keys, keys["model_type"], str(folder))


def read_as(hf: Any, model_type: str) -> Any:
    """The configuration, where transformers does not know its architecture as that of one with the same keys."""
    if not isinstance(hf, Unread):
        return hf
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type, **{k: v for k, v in hf.keys.items() if k not in _OF_THE_FILE})
    config._name_or_path = hf._name_or_path
    return config
