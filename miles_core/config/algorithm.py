"""What follows from the options of [algorithm]; what must hold among them is in refusals.toml."""

from __future__ import annotations

from miles_core.config.tables import RunConfig


def needs_reference(config: RunConfig) -> bool:
    """Whether the reference model scores the rollouts: for the KL term of the loss, or the KL in the reward."""
    return config.algorithm.use_kl_loss or config.algorithm.kl_coef != 0
