"""The plugin: a trainer that has it writes down what its modules computed in the first optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from miles_core.config import RunConfig, option
from miles_core.hookspecs import hookimpl
from miles_divergence.tokens import ROW, number

if TYPE_CHECKING:
    import torch

    from miles_core.columns import Column, Packed
    from miles_core.stages.step import TrainerAccess
    from miles_divergence.observe import Observer

@dataclass(frozen=True, kw_only=True)
class DivergenceOptions:
    """Where to, and with what noise; `miles diff --across` sets both."""

    out: str | None = option(None, "Folder for what the modules computed in the first optimizer step; unset: nothing.")
    noise: float = option(0.0, "Relative noise on the outputs of modules without parts.")


class Divergence:
    """Writes down what every module computes in a step, by Hugging Face names, sample and token."""

    def __init__(self, options: DivergenceOptions, config: RunConfig):
        self.options, self.config = options, config
        self._observer: Observer | None = None

    @hookimpl
    def columns(self) -> list[Column]:
        """The number of every token."""
        return [ROW]

    @hookimpl
    def microbatch(self, proceed: Callable[[Packed], torch.Tensor], packed: Packed, model: str) -> torch.Tensor:
        """Tell which rows this forward computes."""
        if self._observer is None or model != "actor":
            return proceed(packed)
        with self._observer.forward(packed):
            return proceed(packed)

    @hookimpl
    def train_step(self, proceed: Callable[[], dict[str, float]], access: TrainerAccess) -> dict[str, float]:
        """Observe the first step; those after it would train other weights."""
        if self.options.out is None or access.index != 0:
            return proceed()
        import numpy as np

        from miles_divergence.observe import Observer

        for place, sample in enumerate(access.batch.samples):
            sample.columns[ROW.name] = number(place, np.arange(sample.length))
        observer = Observer(access.chunks("actor"), self.options.noise)
        self._observer = observer
        try:
            with observer:
                metrics = proceed()
        finally:
            self._observer = None
        observer.write(Path(self.options.out), access.batch.samples, metrics)
        return metrics
