"""Settings under which images would be ignored, or a run would end late."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from miles_core.config import RunConfig
from miles_core.config.load import config_json, who
from miles_core.errors import CheckpointError, ConfigError
from miles_core.plugins.select import Selected

BUILT = ("gemma3", "llama4", "mistral3", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Families of Megatron's trainer beside whose text model a tower can see."""


def check(config: RunConfig, keys: Mapping[str, object], plugins: Sequence[Selected] = ()) -> RunConfig:
    """The configuration as it is; `keys` of rows are by medium, `plugins` in the order of the run.

    Raises:
        ConfigError: a medium that is not read, or a setting with which a part of the run would not see images.
        CheckpointError: a model that reads no images, or without its processor's files.
    """
    megatron, kind, engine = config.perf.trainer == "megatron", model_type(config), config.rollout.engine or "local"
    shared = config.options.get("fsdp", {}).get("context_parallel_size", 1)
    backend = config.surfaces.get("server", {}).get("attention_backend")
    before = itertools.takewhile(lambda one: one.manifest.name != "vision", plugins)
    earlier = [one.manifest.name for one in before if any(offer.hook == "build_model" for offer in one.manifest.offers)]
    elsewhere = engine not in ("local", "sglang") or (engine == "sglang" and kind in ("llama4", "mistral3"))
    for key, value, unseen, fix in (
        ("vision.multimodal_keys", dict(keys), set(keys) != {"image"} or not isinstance(keys["image"], str),
         """--multimodal-keys '{"image": "images"}': no other medium is read"""),
        ("perf.trainer", f"{config.perf.trainer}, {kind}", config.perf.trainer != "fsdp" and not (
            megatron and kind in (*BUILT, None)), "--trainer fsdp"),
        ("perf.weight_sync", "adapter", megatron and config.perf.weight_sync == "adapter", "--trainer fsdp"),
        ("plugins", ", ".join(earlier), megatron and earlier, "name it after vision, which adds to what it changes"),
        ("fsdp.context_parallel_size", shared, shared != 1 and not megatron, "leave it out: samples stay on a rank"),
        ("rollout.rollout_ignore_eos", True, config.rollout.rollout_ignore_eos, "leave it out: an image's ends it too"),
        ("rollout.engine", f"{engine}, {kind}", elsewhere, "--engine local"),
        ("server.attention_backend", backend, engine == "sglang" and backend != "triton" and kind == "gemma3",
         "--sglang-attention-backend triton: tokens of an image see those after them"),
    ):
        if unseen:
            raise ConfigError("images would not be seen with this setting", code="vision-setting", got=value or None,
                              who=who(config, key), fix=fix)
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
