"""Settings under which the local engine and the trainer would compute different results."""

from __future__ import annotations

from collections.abc import Callable

from miles_core.config.hardware import engine_dtype
from miles_core.config.load import who
from miles_core.config.tables import RunConfig
from miles_core.errors import ConfigError
from miles_core.plugins.resolve import chosen


def check_head(config: RunConfig, note: Callable[[str], None]) -> RunConfig:
    """The configuration as it is.

    Raises:
        ConfigError: the engine rounds logits that the trainer would keep.
    """
    local = chosen(config, "engine") == "local"
    if config.algorithm.fp32_lm_head and local and engine_dtype(config) == "bfloat16":
        raise ConfigError("the local engine rounds bf16 logits, and the trainer would not",
                          code="local-engine-fp32-head", who=who(config, "algorithm.fp32_lm_head"),
                          fix="drop it, or use --engine-dtype float32")
    return config
