"""The Megatron-core trainer as a plugin."""

from __future__ import annotations

from miles_core.hookspecs import hookimpl


class Megatron:
    """Trains with Megatron-core, on a CPU as on GPUs."""

    @hookimpl(name="megatron")
    def trainer(self, config, hooks, columns):
        """The trainer "megatron"."""
        from miles_core.backends.megatron.step import MegatronTrainer

        return MegatronTrainer(config, hooks, columns)
