"""Settings under which the local engine and the trainer would compute different results, or that mean other engines."""

from __future__ import annotations

from collections.abc import Callable

from miles_core.config.hardware import engine_dtype
from miles_core.config.load import who, with_values
from miles_core.config.tables import RunConfig
from miles_core.errors import ConfigError
from miles_core.plugins.resolve import chosen


def check(config: RunConfig, note: Callable[[str], None]) -> RunConfig:
    """The configuration, in which the local engine has no GPUs of its own.

    Raises:
        ConfigError: the engine rounds logits that the trainer would keep.
    """
    local = chosen(config, "engine") == "local"
    if local and config.perf.rollout_num_gpus is not None:  # rates would be divided by it
        note("--rollout-num-gpus changes nothing: the local engine is one, in the driver's process (--engine)")
        config = with_values(config, "one engine, in the driver's process", perf__rollout_num_gpus=None)
    if config.algorithm.fp32_lm_head and local and engine_dtype(config) == "bfloat16":
        raise ConfigError("the local engine rounds bf16 logits, and the trainer would not",
                          code="local-engine-fp32-head", who=who(config, "algorithm.fp32_lm_head"),
                          fix="drop it, or use --engine-dtype float32")
    return config
