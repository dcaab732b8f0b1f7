"""The plugin: options and hooks. The test of a group is in spread.py, the penalty of long answers in overlong.py."""

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
    """When a group has nothing to teach, and what long answers cost."""

    min_reward_std: float = option(1e-8, "Groups whose rewards have a standard deviation up to this are dropped.")
    overlong_buffer_len: int | None = option(
        None, "Response tokens before --rollout-max-response-len in which a penalty grows; default: no penalty."
    )
    overlong_penalty_factor: float = option(1.0, "Penalty of an answer of the full length.")
    filter_penalised: bool = option(False, "Compare rewards after the penalty, not raw ones, to drop a group.")


class DapoFilter:
    """Drops groups whose answers all score the same, and takes a soft penalty off overlong ones (arXiv:2503.14476)."""

    presets = {  # arXiv:2503.14476, sections 3 and 4.1
        "dapo": {"plugins": ["grpo", "dapo-filter"],
                 "values": {"algorithm.eps_clip": 0.2, "algorithm.eps_clip_high": 0.28,
                            "algorithm.calculate_per_token_loss": True, "rollout.n_samples_per_prompt": 16}},
    }

    def __init__(self, options: DapoFilterOptions, config: RunConfig):
        from miles_dapo_filter.overlong import Overlong

        if config.rollout.n_samples_per_prompt == 1:
            raise ConfigError("dapo-filter would drop every group: a group of one has no spread",
                              code="dapo-group-of-one", who="rollout.n_samples_per_prompt", got=1,
                              fix="sample at least 2 answers per prompt")
        self.options = options
        self.overlong = Overlong.of(options, config)

    @hookimpl
    def filter_group(self, group: Group) -> Group | Drop:
        """The group, or Drop("reward_std_zero")."""
        from miles_dapo_filter.spread import keep_spread

        penalty = self.overlong.penalty if self.overlong and self.options.filter_penalised else None
        return keep_spread(group, self.options.min_reward_std, penalty)

    @hookimpl
    def shape_rewards(self, groups: list[Group]) -> list[Group]:
        """Rewards less the penalty; the raw ones stay in metadata["raw_reward"]."""
        if self.overlong is not None:
            for group in groups:
                for sample in group.samples:
                    self.overlong.penalise(sample)
        return groups
