"""What follows from the options of [algorithm]; what must hold among them is in check_silent.py."""

from __future__ import annotations

from collections.abc import Callable

from miles_core.config.load import with_values
from miles_core.config.tables import RunConfig


def clip_band(config: RunConfig, note: Callable[[str], None]) -> RunConfig:
    """A width that is given alone is that of both sides of the clip band, as in radixark Miles."""
    if "algorithm.eps_clip" not in config.origin or "algorithm.eps_clip_high" in config.origin:
        return config
    return with_values(config, "as eps_clip", algorithm__eps_clip_high=config.algorithm.eps_clip)


def needs_reference(config: RunConfig) -> bool:
    """Whether the reference model scores the rollouts: for the KL term of the loss, or the KL in the reward."""
    return config.algorithm.use_kl_loss or config.algorithm.kl_coef != 0
