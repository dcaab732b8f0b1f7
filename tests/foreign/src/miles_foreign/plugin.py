"""The plugin: three parts, each under the name "foreign"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles_core import hookimpl

if TYPE_CHECKING:
    from miles_core.columns import Columns
    from miles_core.config import RunConfig
    from miles_core.types import Rank
    from miles_foreign.engine import HfEngine
    from miles_foreign.sync import Handed
    from miles_foreign.trainer import TorchTrainer


class Foreign:
    """Samples with transformers, trains with torch.optim."""

    provides = ("engine:foreign:tensors:whole-models:cache=float32", "weight_sync:foreign:whole-models")

    @hookimpl(name="foreign")
    def engine(self, config: RunConfig, tokenizer: Any) -> HfEngine:
        """transformers' generate, many requests at once."""
        from miles_foreign.engine import HfEngine

        return HfEngine(str(config.checkpoint.hf_checkpoint), tokenizer, config.rollout.rollout_max_context_len)

    @hookimpl(name="foreign")
    def trainer(self, config: RunConfig, hooks: Any, columns: Columns, rank: Rank) -> TorchTrainer:
        """A Hugging Face module and AdamW."""
        from miles_foreign.trainer import TorchTrainer

        return TorchTrainer(config, hooks, columns, rank)

    @hookimpl(name="foreign")
    def weight_sync(self, config: RunConfig) -> Handed:
        """Tensors from the trainer's module into the engine's."""
        from miles_foreign.sync import Handed

        return Handed(config.rollout.pause_generation_mode)
