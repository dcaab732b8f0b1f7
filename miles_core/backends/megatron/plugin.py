"""The Megatron-core trainer as a plugin."""

from __future__ import annotations

from miles_core.backends.megatron import finder
from miles_core.hookspecs import hookimpl

finder.install()  # here, as the core's own parts are imported before a run's plugins, which may import megatron.core


class Megatron:
    """Trains with Megatron-core, on a CPU as on GPUs."""

    hookspecs = "miles_core.backends.megatron.hookspecs"

    @hookimpl
    def option_surface(self):
        """Megatron-core's fields and Megatron-LM's flags."""
        from miles_core.backends.megatron.options import MegatronOptions

        return [MegatronOptions()]

    @hookimpl
    def derive(self, config, note):
        """The context of --true-on-policy-mode."""
        from miles_core.backends.megatron.on_policy import check_on_policy

        return check_on_policy(config, note) if config.perf.trainer == "megatron" else config

    @hookimpl
    def check(self, config, note):
        """The layout, memory, and what would be computed otherwise than it is meant."""
        from miles_core.backends.megatron.checks import check_trainer
        from miles_core.backends.megatron.layout import check_layouts
        from miles_core.backends.megatron.memory_plan import check_memory

        for step in (check_layouts, check_trainer, check_memory) if config.perf.trainer == "megatron" else ():
            config = step(config, note)
        return config

    @hookimpl
    def plan_lines(self, config):
        """How ranks split model and batch, and what memory they take."""
        from miles_core.backends.megatron.plan_lines import lines

        return lines(config) if config.perf.trainer == "megatron" else []

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
