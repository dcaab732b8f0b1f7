"""The plugin: the engine, and the memory that it shares with a trainer in processes of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable

    from miles_core.config import RunConfig
    from miles_core.plugins.bind import Hooks
    from miles_local.engine import LocalEngine
    from miles_local.shared_memory import SharedMemory


class Local:
    """Decodes in the driver's process, on the CPU, with a copy of the weights of its own."""

    default = True
    hookspecs = "miles_local.hookspecs"
    provides = ("engine:local:tensors:cache=float32", "weight_sync:shared-memory:tensors")

    @hookimpl
    def check(self, config: RunConfig, note: Callable[[str], None]) -> RunConfig:
        """Logits that trainer and engine would round differently."""
        from miles_local.checks import check_head

        return check_head(config, note)

    @hookimpl(name="local")
    def engine(self, config: RunConfig, tokenizer: Any, hooks: Hooks) -> LocalEngine:
        """The engine "local"."""
        from pathlib import Path

        import torch

        from miles_local.engine import LocalEngine

        rollout = config.rollout
        dtype = rollout.engine_dtype or ("bfloat16" if config.perf.bf16 else "float32")
        return LocalEngine(
            Path(str(config.checkpoint.hf_checkpoint)), dtype=getattr(torch, dtype), max_batch=rollout.engine_max_batch,
            max_context=rollout.rollout_max_context_len, tokenizer=tokenizer,
            incoming=hooks.import_weights,
            random_init=not config.debug.debug_rollout_only,  # the trainer's weights arrive before the first request
        )  # fmt: skip

    @hookimpl("weight_sync", name="shared-memory")
    def shared_memory(self, config: RunConfig) -> SharedMemory:
        """Memory that the engine shares with trainer ranks in processes of their own."""
        from miles_local.shared_memory import SharedMemory

        return SharedMemory(config)
