"""The plugin: the engine, and the memory that it shares with a trainer in processes of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from miles_core.config import RunConfig, option
from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from miles_core.plugins.bind import Hooks
    from miles_local.engine import LocalEngine
    from miles_local.shared_memory import SharedMemory


@dataclass(frozen=True, kw_only=True)
class LocalOptions:
    """Where the engine computes."""

    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "Where the local engine decodes; auto is a GPU where torch has one.", flags=("--engine-device",))


class Local:
    """Decodes in the driver's process, on the CPU or a GPU, with a copy of the weights of its own."""

    default = True
    hookspecs = "miles_local.hookspecs"
    provides = ("engine:local:tensors:transformers:cache=float32, on a GPU the engine's dtype",
                "weight_sync:shared-memory:tensors")

    def __init__(self, options: LocalOptions):
        self.options = options

    @hookimpl
    def check(self, config: RunConfig, note: Callable[[str], None]) -> RunConfig:
        """Logits that trainer and engine would round differently, and GPUs of engines that there are not."""
        from miles_local.checks import check

        return check(config, note)

    @hookimpl(name="local")
    def engine(self, config: RunConfig, tokenizer: Any, hooks: Hooks) -> LocalEngine:
        """The engine "local"."""
        from pathlib import Path

        import torch

        from miles_local import heap
        from miles_local.engine import LocalEngine

        heap.share_one()  # with a trainer in this process
        rollout = config.rollout
        dtype = rollout.engine_dtype or ("bfloat16" if config.perf.bf16 else "float32")
        return LocalEngine(
            Path(str(config.checkpoint.hf_checkpoint)), dtype=getattr(torch, dtype), device=self.options.device,
            max_batch=rollout.engine_max_batch, max_context=rollout.rollout_max_context_len, tokenizer=tokenizer,
            incoming=hooks.import_weights, inputs=hooks.prefill_inputs,
            random_init=not config.debug.debug_rollout_only,  # the trainer's weights arrive before the first request
        )  # fmt: skip

    @hookimpl("weight_sync", name="shared-memory")
    def shared_memory(self, config: RunConfig) -> SharedMemory:
        """Memory that the engine shares with trainer ranks in processes of their own."""
        from miles_local.shared_memory import SharedMemory

        return SharedMemory(config)
