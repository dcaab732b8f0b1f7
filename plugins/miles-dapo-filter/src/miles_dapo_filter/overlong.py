"""Soft overlong punishment: DAPO (arXiv:2503.14476), eq. 13.

For an answer of n tokens, of which L are allowed and the last C are the buffer,

    penalty = 0                              n <= L - C
              factor x ((L - C) - n) / C     L - C < n <= L
              -factor                        L < n

DAPO has C = 4096 and factor 1. Answers of one call end at L; those of several may be longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from miles_core.config import RunConfig
from miles_core.errors import ConfigError
from miles_core.types import Sample

if TYPE_CHECKING:
    from miles_dapo_filter.plugin import DapoFilterOptions


@dataclass(frozen=True, slots=True)
class Overlong:
    """The penalty of a run.

    Args:
        most: response tokens that an answer may have.
        buffer: the last so many of them, in which the penalty grows.
        factor: the penalty at the limit.
    """

    most: int
    buffer: int
    factor: float

    @classmethod
    def of(cls, options: DapoFilterOptions, config: RunConfig) -> Overlong | None:
        """What the options say; None where there is no penalty.

        Raises:
            ConfigError: a buffer longer than an answer, a factor that is not a number, or an option without effect.
        """
        most, buffer, who = config.rollout.rollout_max_response_len, options.overlong_buffer_len, "[dapo-filter]"
        if buffer is None:
            for key in ("overlong_penalty_factor", "filter_penalised"):
                if f"dapo-filter.{key}" in config.origin:
                    raise ConfigError(f"{key} has no effect without overlong_buffer_len",
                                      code="overlong-option-without-buffer", who=who,
                                      fix="write overlong_buffer_len, or drop it")
            return None
        if not 1 <= buffer <= most:
            raise ConfigError("overlong_buffer_len should be shorter than the response",
                              code="overlong-buffer-too-long", who=f"{who}, "
                                                                                             "rollout_max_response_len",
                              got=f"{buffer} of {most} tokens", fix=f"take 1 to {most}; DAPO has a fifth of it")
        if options.overlong_penalty_factor <= 0:
            raise ConfigError("overlong_penalty_factor should be above 0", code="overlong-penalty-out-of-range",
                              got=options.overlong_penalty_factor, who=who,
                              fix="DAPO has 1; leave overlong_buffer_len out for no penalty")
        return cls(most, buffer, options.overlong_penalty_factor)

    def penalty(self, sample: Sample) -> float:
        """What is added to the reward: -factor to 0."""
        return self.factor * max(-1.0, min(0, self.most - self.buffer - sample.response_length) / self.buffer)

    def penalise(self, sample: Sample) -> None:
        """Take the penalty off, and tell of it: means under rollout/ are overlong_penalty and overlong_ratio."""
        penalty = self.penalty(sample)
        sample.metadata.setdefault("raw_reward", sample.reward)
        sample.reward = cast("float", sample.reward) + penalty  # groups are scored before they are filtered
        sample.metadata["figures"] = {**sample.metadata.get("figures", {}), "overlong_penalty": penalty,
                                      "overlong_ratio": float(penalty < 0)}
