"""A model that trains: its optimizer, its schedule, and the steps that it has taken."""

from __future__ import annotations

from collections.abc import Callable

from miles_core.config.tables import Optimizer
from miles_core.stages.gradients import Gradients
from miles_fsdp.module import CausalModule
from miles_fsdp.optimizer import Schedule, ShardedGradients, optimizer_of, update
from miles_fsdp.plugin import FsdpOptions
from miles_fsdp.ranks import Ranks
from miles_fsdp.tensor_parallel import add_up


class Trained:
    """
    Args:
        options: this model's, as a critic has its own learning rate.
        own: how Muon moves its matrices.
        steps: of the whole run.
    """

    def __init__(self, name: str, module: CausalModule, options: Optimizer, own: FsdpOptions, steps: int):
        self.name, self.module, self.options, self.steps = name, module, options, 0
        self.optimizer, self.schedule = optimizer_of(module, options, own), Schedule.of(options, steps)

    def step(self, ranks: Ranks, clipping: str, clip: Callable[[Gradients], object]) -> dict[str, float]:
        """Clip, update, move the schedule. See optimizer.update."""
        if ranks.tensor is not None:
            add_up(self.module.model, self.module.partial, ranks.tensor.get_group())
        gradients = ShardedGradients(self.name, self.module, ranks, self.options.clip_grad)
        metrics = update(self.optimizer, gradients, self.schedule.rate(self.steps), clipping, clip)
        self.steps += 1
        return metrics
