"""Errors of a training phase explained: the rank that ran out of memory, or what Megatron-core does not support."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from miles_local.muon_options import LAYER_WISE, MUON

from miles_core.config.load import who
from miles_core.config.tables import RunConfig
from miles_core.errors import ConfigError, OutOfMemoryError
from miles_megatron.layout import layout_of

_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+ ?\w+)")
"""What torch's CUDA and CPU allocators both say."""

STATE = ("load", "onload")
"""Phases in which weights, gradients and optimizer state alone do not fit."""


@contextmanager
def explained(phase: str, rank: int, config: RunConfig, *, starting: bool = False) -> Iterator[None]:
    """Name the phase and rank of an out-of-memory error inside, and the options that Megatron-core fails on.

    Args:
        starting: no step has been made yet, so that an error in Megatron-core is taken for one of its options.

    Raises:
        OutOfMemoryError: in the place of torch's.
        ConfigError: in the place of Megatron-core's own, if options of it are set.
    """
    try:
        yield
    except (AssertionError, AttributeError, ImportError, KeyError, NotImplementedError, TypeError, ValueError,
            RuntimeError) as error:
        size = _ASKED.search(str(error))
        if not isinstance(error, torch.OutOfMemoryError) and (size is None or "allocator" not in str(error).lower()):
            if starting and config.surface("megatron") and _raised_in_megatron(error):
                raise ConfigError(
                    f"Megatron-core fails in {phase} with these options", got=f"{type(error).__name__}: {error}"[:500],
                    who=who(config, *(f"megatron.{name}" for name in config.surface("megatron"))),
                    fix="remove or change the option that the message names", code="megatron-options-fail",
                ) from error
            raise
        raise OutOfMemoryError(f"out of memory in {phase}", code="trainer-out-of-memory",
                               got=f"an allocation of {size[1]}" if size else None, who=f"trainer rank {rank}",
                               fix=f"try, in this order: {', '.join(remedies(phase, config))}") from error


def _raised_in_megatron(error: BaseException) -> bool:
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    ours = [module for module in modules if not module.startswith("torch")]
    return bool(ours) and ours[-1].startswith("megatron.core")


def remedies(phase: str, config: RunConfig) -> list[str]:
    """Flags with values that take less memory than the run's, what costs least first."""
    perf, megatron = config.perf, config.surface("megatron")
    tensor = megatron.get("tensor_model_parallel_size") or 1
    if config.optimizer.optimizer in MUON:
        layout, whole = layout_of(config), config.optimizer.optimizer != LAYER_WISE
        state = [f"--optimizer {LAYER_WISE}"] * (whole and layout.data * layout.context > 1)
    else:
        state = ["--optimizer-cpu-offload"] * (not megatron.get("optimizer_cpu_offload"))
    state += [f"--tensor-model-parallel-size {2 * tensor}, or more ranks"]
    if phase in STATE:
        return state
    batch = []
    if not 0 < (rows := perf.log_probs_chunk_size) <= 128:
        batch.append(f"--log-probs-chunk-size {rows // 2 if rows > 0 else 1024}")
    # A pass without gradient keeps no activations.
    if megatron.get("recompute_granularity") != "full" and "log_probs" not in phase:
        batch.append("--recompute-granularity full")
    if perf.use_dynamic_batch_size:
        limit = perf.max_tokens_per_gpu
        if "log_probs" in phase and perf.log_probs_max_tokens_per_gpu:
            batch.append(f"--log-probs-max-tokens-per-gpu {perf.log_probs_max_tokens_per_gpu // 2}")
        else:
            batch.append(f"--max-tokens-per-gpu {limit // 2}")
    elif perf.micro_batch_size > 1:
        batch.append(f"--micro-batch-size {perf.micro_batch_size // 2}")
    return batch + state
