"""A reward for random models, which answer nothing right: one for every second response, by its tokens."""

from __future__ import annotations

from miles_core.hookspecs import hookimpl


class Coin:
    """Rewards that differ within a group, so that there is something to train on."""

    name = "coin"

    @hookimpl
    def reward(self, sample) -> float:
        """The parity of the sum of a sample's tokens."""
        return float(sample.tokens.sum() % 2)
