"""The plugin: options and hook. The test itself is in spread.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles_core.config import RunConfig, option
from miles_core.errors import ConfigError
from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from miles_core.types import Drop, Group


@dataclass(frozen=True, kw_only=True)
class DapoFilterOptions:
    """When a group has nothing to teach."""

    min_reward_std: float = option(1e-8, "Groups whose rewards have a standard deviation up to this are dropped.")


class DapoFilter:
    """Drops groups whose answers all score the same: they have no advantage and no gradient (arXiv:2503.14476)."""

    def __init__(self, options: DapoFilterOptions, config: RunConfig):
        if config.rollout.n_samples_per_prompt == 1:
            raise ConfigError("dapo-filter would drop every group: a group of one has no spread",
                              who="rollout.n_samples_per_prompt", got=1, fix="sample at least 2 answers per prompt")
        self.options = options

    @hookimpl
    def filter_group(self, group: Group) -> Group | Drop:
        """The group, or Drop("reward_std_zero")."""
        from miles_dapo_filter.spread import keep_spread

        return keep_spread(group, self.options.min_reward_std)
