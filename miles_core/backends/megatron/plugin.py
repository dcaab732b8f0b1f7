"""The Megatron-core trainer as a plugin."""

from __future__ import annotations

from miles_core.hookspecs import hookimpl


class Megatron:
    """Trains with Megatron-core, on a CPU as on GPUs."""

    @hookimpl(name="megatron")
    def trainer(self, config, hooks, columns, rank):
        """The trainer "megatron"."""
        from miles_core.backends.megatron.step import MegatronTrainer

        return MegatronTrainer(config, hooks, columns, rank)

    @hookimpl("clip_gradients", name="norm")
    def clip_by_norm(self, gradients):
        """To a global norm of at most --clip-grad."""
        return gradients.clip_by_norm()

    @hookimpl("model_spec", name="qwen3")
    def qwen3(self, hf_config):
        """Dense Qwen3."""
        from miles_core.backends.megatron.families import FAMILIES

        return FAMILIES["qwen3"]

    @hookimpl("model_spec", name="qwen3_moe")
    def qwen3_moe(self, hf_config):
        """Qwen3 with a mixture of experts."""
        from miles_core.backends.megatron.families import FAMILIES

        return FAMILIES["qwen3_moe"]
