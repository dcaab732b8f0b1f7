"""config.json as transformers reads it, and as it stands where transformers does not know the architecture."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core.errors import CheckpointError, ConfigError
from miles_core.reading import parse_json, reading

_OF_THE_FILE = frozenset({"model_type", "architectures", "auto_map", "quantization_config", "transformers_version"})
"""Keys that say nothing of the model's shape."""

FOREIGN: Mapping[str, tuple[object, ...]] = {
    "attn_logit_softcapping": (), "final_logit_softcapping": (), "clip_qkv": (), "attention_chunk_size": (),
    "sliding_window": (), "use_sliding_window": (), "attention_multiplier": (), "embedding_multiplier": (1,),
    "residual_multiplier": (1,), "logits_scaling": (1,), "logit_scale": (1,), "alibi": (), "use_mrope": (),
    "parallel_attn": (), "use_parallel_residual": (),
}  # fmt: skip
"""Keys by which some architectures compute otherwise, without a tensor that would tell -> values beside null, false and
0 that change nothing."""


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

    @property
    def text_config(self) -> Unread:
        """The text model's, of one that sees; a family reads it with `read_as` as well."""
        return Unread(self.keys["text_config"], self.model_type, self._name_or_path)


def read(folder: Path) -> Any:
    """The configuration of a Hugging Face directory. Code that comes with a checkpoint is not run.

    Raises:
        OSError: no config.json.
        ValueError, KeyError: it cannot be read, or has no model_type.
        ConfigError: a key of another architecture, which would go unread.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    keys = parse_json((folder / "config.json").read_text(encoding="utf-8"))
    if keys["model_type"] in CONFIG_MAPPING:
        hf = AutoConfig.from_pretrained(folder, local_files_only=True)
        _refuse_foreign(keys.get("text_config") or keys, hf.get_text_config(), folder)
        return hf
    return Unread(keys, keys["model_type"], str(folder))


def quantization(folder: Path) -> dict[str, Any]:
    """What config.json says of quantised weights, itself or for the text model inside; empty for plain ones.

    Raises:
        CheckpointError: config.json cannot be read.
    """
    path = folder / "config.json"
    with reading(str(path), CheckpointError):
        keys = parse_json(path.read_text(encoding="utf-8")) if path.is_file() else {}
        return dict(keys.get("quantization_config") or (keys.get("text_config") or {}).get("quantization_config") or {})


_QUANTISED = ("quantization_config", "expert_dtype")
"""Keys of weights that are not plain; the second is DeepSeek-V4's."""


def without_quantization(folder: Path) -> dict[str, Any]:
    """Keys that config.json has otherwise once the weights are plain; None takes a key out.

    Raises:
        CheckpointError: config.json cannot be read.
    """
    path = folder / "config.json"
    with reading(str(path), CheckpointError):
        text = parse_json(path.read_text(encoding="utf-8")).get("text_config")
    plain = {key: value for key, value in (text or {}).items() if key not in _QUANTISED}
    return dict.fromkeys(_QUANTISED) | ({"text_config": plain} if text else {})


def read_as(hf: Any, model_type: str) -> Any:
    """The configuration, where transformers does not know its architecture as that of one with the same keys.

    Raises:
        ConfigError: a key of a third architecture, which would go unread.
    """
    if not isinstance(hf, Unread):
        return hf
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type, **{k: v for k, v in hf.keys.items() if k not in _OF_THE_FILE})
    config._name_or_path = hf._name_or_path
    _refuse_foreign(hf.keys, config, Path(hf._name_or_path))
    return config


def _refuse_foreign(keys: Mapping[str, Any], config: Any, folder: Path) -> None:
    """transformers keeps keys that the architecture does not have, and computes without them."""
    known = {field.name for field in dataclasses.fields(config)} | set(config.attribute_map)
    unread = {key: keys[key] for key, neutral in FOREIGN.items()
              if key not in known and keys.get(key) and keys[key] not in neutral}
    if keys.get("use_sliding_window") is False:
        unread.pop("sliding_window", None)
    if unread:
        key, value = next(iter(unread.items()))
        raise ConfigError(f"{config.model_type} has no {key}: the model would be computed without it", got=value,
                          who=f"{folder}/config.json", code="config-key-unread",
                          fix=f"take {key} out of config.json if the model is meant without it, or write a model_spec "
                          "plugin (docs/model-families.md)")
