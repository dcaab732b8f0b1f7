"""The plugin: the trainer, its options, and the families that it knows itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles_core.hookspecs import hookimpl
from miles_megatron import finder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import click

    from miles_core.columns import Columns
    from miles_core.config import RunConfig
    from miles_core.config.surfaces import Surface
    from miles_core.plugins.bind import Hooks
    from miles_core.plugins.select import Selected
    from miles_core.types import Rank
    from miles_megatron.specs import Family
    from miles_megatron.step import MegatronTrainer

finder.install()  # here, as this is imported before the run's other plugins, which may import megatron.core


class Megatron:
    """Trains with Megatron-core, on a CPU as on GPUs."""

    default = True
    hookspecs = "miles_megatron.hookspecs"
    provides = ("trainer:megatron:model_spec",)

    @hookimpl("commands", name="convert")
    def convert(self) -> click.Command:
        """Convert a checkpoint: Hugging Face to torch_dist, or back."""
        from miles_megatron.commands.convert import command

        return command

    @hookimpl("commands", name="layouts")
    def layouts(self) -> click.Command:
        """Which layouts of ranks fit the memory of so many GPUs."""
        from miles_megatron.commands.layouts import command

        return command

    @hookimpl
    def option_surface(self) -> Iterable[Surface]:
        """Megatron-core's fields and Megatron-LM's flags."""
        from miles_megatron.options import MegatronOptions

        return [MegatronOptions()]

    @hookimpl
    def derive(self, config: RunConfig, note: Callable[[str], None]) -> RunConfig:
        """What follows of the layout, and of the optimizer."""
        from miles_megatron.layout import completed
        from miles_megatron.muon_plan import whole_state

        return whole_state(completed(config, note), note) if config.perf.trainer == "megatron" else config

    @hookimpl
    def check(self, config: RunConfig, note: Callable[[str], None], plugins: Sequence[Selected]) -> RunConfig:
        """The layout, memory, and what would be computed otherwise than it is meant, or twice."""
        from miles_core.plugins.one_pass import one_pass
        from miles_megatron.checks import check_trainer
        from miles_megatron.layout import check_layouts
        from miles_megatron.memory_plan import check_memory
        from miles_megatron.on_policy import check_on_policy

        if config.perf.trainer != "megatron":
            return config
        for step in (check_on_policy, check_layouts, check_trainer, check_memory):
            config = step(config, note)
        return one_pass(config, note, plugins)

    @hookimpl
    def plan_lines(self, config: RunConfig) -> Iterable[tuple[str, str]]:
        """How ranks split model and batch, and what memory they take."""
        from miles_megatron.plan_lines import lines

        return lines(config) if config.perf.trainer == "megatron" else []

    @hookimpl(name="megatron")
    def trainer(self, config: RunConfig, hooks: Hooks, columns: Columns, rank: Rank) -> MegatronTrainer:
        """The trainer "megatron"."""
        from miles_megatron.step import MegatronTrainer

        return MegatronTrainer(config, hooks, columns, rank)

    @hookimpl("model_spec", name="qwen3")
    def qwen3(self, hf_config: Any) -> Family:
        """Dense Qwen3."""
        from miles_megatron.families import FAMILIES

        return FAMILIES["qwen3"]

    @hookimpl("model_spec", name="qwen3_moe")
    def qwen3_moe(self, hf_config: Any) -> Family:
        """Qwen3 with a mixture of experts."""
        from miles_megatron.families import FAMILIES

        return FAMILIES["qwen3_moe"]
