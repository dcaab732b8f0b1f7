"""What follows from the hardware that a run asks for: colocation, the engine's GPUs, how weights travel."""

from __future__ import annotations

from collections.abc import Callable

from miles_core.config.load import with_values
from miles_core.config.tables import RunConfig


def hardware(config: RunConfig, note: Callable[[str], None]) -> RunConfig:
    """The configuration with weight_sync chosen."""
    if config.perf.weight_sync is None:
        config = with_values(config, "engine and placement", perf__weight_sync=_weight_sync(config))
    return config


def _weight_sync(config: RunConfig) -> str:
    if config.rollout.engine != "sglang":
        return "in-process"
    return "ipc" if config.perf.colocate else "broadcast"
