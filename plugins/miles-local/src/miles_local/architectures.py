"""Which architectures of transformers the engine decodes, by a checkpoint's config.json."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from miles_core.errors import CheckpointError
from miles_core.reading import parse_json
from miles_local import repairs  # noqa: F401 - models are built here

WITH_STATES = {"linear_attention"}
"""Kinds of layers whose past is a state."""
LAYERS = WITH_STATES | {"full_attention", "sliding_attention", "chunked_attention", "mlp", "moe"}
"""These, those whose past is keys and values by position, and those that have none. Of others the past is not kept."""
BATCHED_ROPES = {"dynamic", "longrope"}
"""Rotary embeddings whose frequencies change with the longest sequence of the batch."""


def _by_architecture(said: Mapping[str, Any]) -> str | None:
    """transformers' model_type of the class that config.json names, where it does not know the model_type there."""
    if said.get("model_type") in CONFIG_MAPPING:
        return None
    kinds = {name: kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}
    return next((kinds[name] for name in said.get("architectures") or () if name in kinds), None)


def class_of(config: PreTrainedConfig, whole: bool = False) -> type | None:
    """transformers' class that decodes text: the text model's, or the whole model's where only that has one.

    Args:
        whole: a model that reads images is built with what reads them.
    """
    text, images = type(config.get_text_config()), AutoModelForImageTextToText._model_mapping
    if whole and "vision_config" in config.sub_configs:
        return images.get(type(config), None)
    for mapping, kind in ((AutoModelForCausalLM._model_mapping, text),
                          (AutoModelForCausalLM._model_mapping, type(config)),
                          (images, text)):  # where it lists Mistral Small 4's
        if kind in mapping:
            return mapping[kind]
    return None


def taken_out(config: PreTrainedConfig) -> bool:
    """Whether the text model inside is decoded by a class that knows nothing of the model around it."""
    text, known = type(config.get_text_config()), AutoModelForCausalLM._model_mapping
    return type(config) is not text and (text in known or type(config) not in known)


def inside_text(name: str) -> str | None:
    """The name that a tensor of a larger model has in the text model alone; None for what is beside that."""
    inside = name.partition("language_model.")[2]
    if not inside:
        return name if name.startswith("lm_head.") else None
    return inside if inside.startswith(("model.", "lm_head.")) else f"model.{inside}"


def config_of(folder: Path, whole: bool = False) -> PreTrainedConfig:
    """Read config.json, from local files and without remote code.

    Args:
        whole: as `class_of`.

    Raises:
        CheckpointError: transformers does not know the architecture, or its rope depends on the batch.
    """
    try:
        hf_config = parse_json((folder / "config.json").read_text(encoding="utf-8"))
        known = _by_architecture(hf_config)
        more = {key: value for key, value in hf_config.items() if key not in ("model_type", "auto_map")}
        config = AutoConfig.for_model(known, **more) if known else AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError("transformers does not support this architecture",
                              code="architecture-not-in-transformers", got=str(error).splitlines()[0], who=str(folder),
                              fix="use --engine sglang, or another checkpoint") from error
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # `import_weights` makes streams plain; transformers would not expect that
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = {one.get("rope_type") for one in (rope, *rope.values()) if isinstance(one, dict)}
    problems = {
        "model_type": config.model_type if class_of(config, whole) is None else None,
        "rope_type": sorted(kinds & BATCHED_ROPES),
        "max_position_embeddings": None if getattr(text, "max_position_embeddings", None) else "none",
    }
    for key, got in problems.items():
        if got:
            raise CheckpointError(f"the local engine does not decode this {key}", got=got, who=str(folder),
                                  fix="use --engine sglang, or another checkpoint", code="local-config-unsupported")
    return config


@functools.cache
def cache_word(module: type[PreTrainedModel]) -> str:
    """What an architecture's forward calls the cache; transformers 5.24 renamed it in most."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"
