"""Settings under which images would be ignored, or a run would end late."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from miles_core.config import RunConfig
from miles_core.config.load import config_json, who
from miles_core.errors import CheckpointError, ConfigError

BUILT = ("mistral3", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe")
"""Families of Megatron's trainer beside whose text model a tower can see: later tokens alone see an image's, and these
enter the model by its embedding only."""


def check(config: RunConfig, keys: Mapping[str, object]) -> RunConfig:
    """The configuration as it is.

    Args:
        keys: of rows, by medium.

    Raises:
        ConfigError: no key of images or other keys, a trainer that sees none, or not with this model, rows shared among
            ranks, adapters that travel alone.
        CheckpointError: a model that reads no images, or without its processor's files.
    """
    if set(keys) != {"image"} or not isinstance(keys["image"], str):
        raise ConfigError("the plugin vision reads images, and no other medium", code="vision-keys", got=keys or None,
                          who=who(config, "vision.multimodal_keys"), fix="""--multimodal-keys '{"image": "images"}'""")
    megatron, kind = config.perf.trainer == "megatron", model_type(config)
    if config.perf.trainer != "fsdp" and not (megatron and kind in (*BUILT, None)):
        raise ConfigError("this trainer computes this model without images", code="vision-trainer",
                          got=f"{config.perf.trainer}, {kind}", who=who(config, "perf.trainer"), fix="--trainer fsdp")
    if megatron and config.perf.weight_sync == "adapter":
        raise ConfigError("what reads images travels with all weights", code="vision-adapters-alone", got="adapter",
                          who=who(config, "perf.weight_sync"), fix="leave it out, or train with --trainer fsdp")
    if not megatron and (config.options.get("fsdp") or {}).get("context_parallel_size", 1) != 1:
        raise ConfigError("a sample with images cannot be shared among ranks", code="vision-context-parallel",
                          who=who(config, "fsdp.context_parallel_size"), fix="leave --fsdp.context-parallel-size out")
    _check_model(config)
    return config


def model_type(config: RunConfig) -> object:
    """Of the checkpoint; None where it is not here."""
    return (config_json(config)[1] or {}).get("model_type")


def _check_model(config: RunConfig) -> None:
    from miles_vision.processor import PLACEHOLDERS

    folder, constants = Path(str(config.checkpoint.hf_checkpoint)), config_json(config)[1]
    if constants is None:  # not here yet, and named by others
        return
    if not any(isinstance(constants.get(name), int) for name in PLACEHOLDERS[:2]) or "vision_config" not in constants:
        raise CheckpointError("the model reads no images: its config.json names no vision_config or no token of them",
                              code="vision-model-without-images", got=constants.get("model_type"),
                              who=f"--hf-checkpoint {folder}", fix="use a vision-language model, or no --plugin vision")
    if not any((folder / name).is_file() for name in ("preprocessor_config.json", "processor_config.json")):
        raise CheckpointError("the model's image processor is missing", code="vision-processor-missing",
                              got="no preprocessor_config.json", who=f"--hf-checkpoint {folder}",
                              fix="copy it from where the model was published")
