"""What follows from the hardware that a run asks for: the engine, colocation, GPUs, placement, how weights travel."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from miles_core.config.load import who, with_values
from miles_core.config.tables import RunConfig
from miles_core.errors import ConfigError

Note = Callable[[str], None]


def trainer_host(config: RunConfig, note: Note) -> RunConfig:
    """The configuration with trainer_host decided, once it is known who places the ranks.

    Raises:
        ConfigError: somebody else decides it.
    """
    perf = config.perf
    if perf.placement != "local" and perf.trainer_host is not None:
        raise ConfigError(f"--placement {perf.placement} chooses the trainer's host itself",
                          code="trainer-host-and-placement", got=f"trainer_host = {perf.trainer_host}",
                          who=who(config, "perf.trainer_host"), fix="remove --trainer-host")
    if perf.trainer_host is not None:
        return config
    host = "process" if trainer_gpus(config) > 1 else "thread"
    return with_values(config, "number of ranks", perf__trainer_host=host)


def weight_sync(config: RunConfig, note: Note) -> RunConfig:
    """The configuration with weight_sync decided, once it is known what the ranks are.

    Raises:
        ConfigError: one that cannot reach the engine.
    """
    perf, sync = config.perf, config.perf.weight_sync
    if config.debug.debug_train_only:  # none is made, and a replay may name what its rollouts were sampled with
        return config
    if sync is None:
        apart = perf.placement == "local" and perf.trainer_host == "process"
        usual = ("shared-memory" if apart else "in-process", "ipc" if perf.colocate else "broadcast")
        how = next((name for name in (*usual, *_syncs(config)) if config.reaches(name)), usual[0])
        return weight_sync(with_values(config, "engine and placement", perf__weight_sync=how), note)
    if not config.reaches(sync):
        suited = ", ".join(name for name in _syncs(config) if config.reaches(name))
        needs, engine = ", ".join(config.stated[f"weight_sync:{sync}"]), config.rollout.engine or "local"
        raise ConfigError(f"the weight sync {sync!r} does not support the engine {engine!r}",
                          code="weight-sync-engine-mismatch", who=who(config, "perf.weight_sync"),
                          got=f"it needs {needs}, and the engine understands {', '.join(sorted(config.understood))}",
                          fix=f"use one of {suited}, or remove it" if suited else "use that of the engine's plugin")
    return config


def _syncs(config: RunConfig) -> list[str]:
    """Weight syncs whose plugins state what they need."""
    return [name for hook, _, name in (part.partition(":") for part in config.stated) if hook == "weight_sync"]


def gpus() -> int:
    """GPUs of this machine that a run may use, without asking any driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return sum(1 for word in visible.split(",") if word.strip() not in ("", "-1"))
    return sum(1 for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))


def engine_dtype(config: RunConfig) -> str:
    """What the engine computes in: its own dtype, else the trainer's."""
    return config.rollout.engine_dtype or ("bfloat16" if config.perf.bf16 else "float32")


def trainer_gpus(config: RunConfig) -> int:
    """GPUs of the trainer, one for each rank."""
    return config.perf.actor_num_nodes * config.perf.actor_num_gpus_per_node


def colocate(config: RunConfig, note: Note) -> RunConfig:
    """Both sides give their memory back while the other works, unless somebody says otherwise."""
    perf, alone = config.perf, config.debug.debug_rollout_only or config.debug.debug_train_only
    parked = {key: getattr(perf, key) for key in ("offload_train", "offload_rollout")}
    if perf.colocate:
        return with_values(config, "--colocate", **{
            f"perf__{key}": not alone if value is None else value for key, value in parked.items()})
    for key, value in parked.items():
        if value:
            note(f"--{key.replace('_', '-')} parks nothing without --colocate: each side has GPUs of its own")
    return config
