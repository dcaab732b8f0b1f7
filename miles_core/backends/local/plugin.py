"""The local engine as a plugin."""

from __future__ import annotations

from miles_core.hookspecs import hookimpl


class Local:
    """Decodes in the driver's process, on a CPU or GPU, with a copy of the weights of its own."""

    hookspecs = "miles_core.backends.local.hookspecs"
    provides = ("engine:local:tensors:cache=float32",)

    @hookimpl
    def check(self, config, note):
        """Logits that trainer and engine would round differently."""
        from miles_core.backends.local.checks import check_head

        return check_head(config, note)

    @hookimpl(name="local")
    def engine(self, config, tokenizer, hooks):
        """The engine "local"."""
        from pathlib import Path

        import torch

        from miles_core.backends.local.engine import LocalEngine

        rollout = config.rollout
        dtype = rollout.engine_dtype or ("bfloat16" if config.perf.bf16 else "float32")
        return LocalEngine(
            Path(config.checkpoint.hf_checkpoint), dtype=getattr(torch, dtype), max_batch=rollout.engine_max_batch,
            max_context=rollout.rollout_max_context_len, tokenizer=tokenizer,
            incoming=hooks.import_weights,
            random_init=not config.debug.debug_rollout_only,  # the trainer's weights arrive before the first request
        )  # fmt: skip
