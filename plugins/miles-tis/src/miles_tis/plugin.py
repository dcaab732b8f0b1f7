"""The plugin: options and hooks. Weights are in weights.py, metrics in mismatch.py, imported when first used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from miles_core.config import RunConfig, option
from miles_core.config.load import with_values
from miles_core.errors import ConfigError
from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from miles_core.stages.loss import LossInputs, Metrics, TokenWeights
    from miles_core.stages.step import TrainerAccess


@dataclass(frozen=True, kw_only=True)
class TisOptions:
    """Which weight a token gets and which tokens are left out; with nothing switched on there are metrics alone."""

    use_tis: bool = option(
        False, "Multiply the policy loss by trainer / engine probability, bounded.", flags=("--use-tis",)
    )
    tis_clip: float = option(2.0, "Upper bound of the weight.", flags=("--tis-clip", "--tis-threshold"))
    tis_clip_low: float = option(0.0, "Lower bound of the weight.", flags=("--tis-clip-low",))
    tis_level: Literal["token", "sequence", "geometric"] = option(
        "token", "Ratio of a token, product over its sample, or geometric mean over it.", flags=("--tis-level",)
    )
    tis_mode: Literal["truncate", "clip", "mask"] = option(
        "clip", "Bound from above, on both sides, or drop tokens outside the bounds (IcePop).", flags=("--tis-mode",)
    )
    tis_batch_normalize: bool = option(
        False, "Divide the weights by their mean over the optimizer step.", flags=("--tis-batch-normalize",)
    )
    use_rs: bool = option(False, "Drop tokens whose ratio at rs_level is out of bounds.", flags=("--use-rs",))
    rs_level: Literal["token", "sequence", "geometric"] = option(
        "token", "Level of the ratio that decides on rejection.", flags=("--rs-level",)
    )
    rs_lower_bound: float | None = option(
        None, "Lower bound of rejection; default: tis_clip_low.", flags=("--rs-lower-bound",)
    )
    rs_upper_bound: float | None = option(
        None, "Upper bound of rejection; default: tis_clip.", flags=("--rs-upper-bound",)
    )
    rs_veto_threshold: float | None = option(
        None, "Drop samples with a token whose ratio is below this.", flags=("--rs-veto-threshold",)
    )
    use_opsm: bool = option(
        False, "Drop samples of negative advantage from which the policy has moved away.", flags=("--use-opsm",)
    )
    opsm_delta: float = option(1e-4, "Mean old minus new log-prob above which a sample counts as moved away "
                                     "from.", flags=("--opsm-delta",))


class Tis:
    """Importance weights, rejection and metrics for the gap between engine and trainer: TIS, IcePop, MIS, OPSM."""

    provides = ("needs-no-log-prob-pass",)

    def __init__(self, options: TisOptions, config: RunConfig):
        _check(options, config)
        self.options, self._mean = options, 1.0

    @hookimpl
    def derive(self, config: RunConfig) -> RunConfig:
        """A mean over the step's weights needs the old log-probs before the step."""
        if not self.options.tis_batch_normalize or "algorithm.skip_actor_forward_only" in config.origin:
            return config
        return with_values(config, "tis_batch_normalize", algorithm__skip_actor_forward_only=False)

    @hookimpl
    def train_step(self, proceed: Callable[[], Metrics], access: TrainerAccess) -> Metrics:
        """Before the step: the mean weight of all its tokens, from the same columns on every rank."""
        if self.options.tis_batch_normalize:
            from miles_tis.weights import step_mean

            self._mean = step_mean(access.samples, self.options)
        return proceed()

    @hookimpl
    def token_weights(self, weights: TokenWeights, inputs: LossInputs) -> TokenWeights:
        """The correction of N tokens on top of what other plugins gave them."""
        from miles_tis.weights import corrected

        return corrected(weights, inputs, self.options, self._mean)


def _check(options: TisOptions, config: RunConfig) -> None:
    algorithm = config.algorithm
    low, high = options.rs_lower_bound, options.rs_upper_bound
    low, high = options.tis_clip_low if low is None else low, options.tis_clip if high is None else high
    for names, lower, upper in (("tis_clip_low and tis_clip", options.tis_clip_low, options.tis_clip),
                                ("rs_lower_bound and rs_upper_bound", low, high)):
        if not 0 <= lower < upper:
            raise ConfigError(f"{names} should be bounds of a ratio, the lower one first", got=f"{lower} and {upper}",
                              who="[tis]", code="tis-bounds-invalid", fix="use 0.5 and 2.0, for example")
    if options.use_tis and not options.tis_clip_low <= 1 <= options.tis_clip or options.use_rs and not low <= 1 <= high:
        raise ConfigError("the ratio is 1 where engine and trainer agree, and it should lie within its bounds",
                          got=f"{options.tis_clip_low} to {options.tis_clip}, {low} to {high}", who="[tis]",
                          fix="use 0.5 and 2.0, for example", code="tis-bounds-exclude-one")
    if options.use_tis and options.tis_clip_low > 0 and options.tis_mode == "truncate":
        raise ConfigError("truncation only bounds weights from above", code="tis-truncation-lower-bound",
                          got=f"tis_clip_low {options.tis_clip_low}", who="tis.tis_clip_low, tis.tis_mode",
                          fix="leave --tis-clip-low out, or --tis-mode clip")
    if (options.use_tis or options.use_rs) and algorithm.loss_type == "sft_loss":
        raise ConfigError("demonstrations were not sampled, so there are no engine probabilities to weight them by",
                          code="tis-with-demonstrations", who="[tis], algorithm.loss_type",
                          fix="leave --use-tis and --use-rs out")
    if options.use_tis and algorithm.use_rollout_logprobs:
        raise ConfigError("use_tis and use_rollout_logprobs correct the same gap twice",
                          code="tis-with-rollout-log-probs", who="[tis], [algorithm]",
                          fix="drop one: with use_rollout_logprobs the ratio of the loss is to the engine already")
    if not options.tis_batch_normalize:
        return
    if not options.use_tis or options.tis_level == "geometric":
        raise ConfigError("tis_batch_normalize is for use_tis with tis_level token or sequence",
                          code="tis-normalize-needs-use-tis", who="[tis]",
                          got=f"use_tis {options.use_tis}, tis_level {options.tis_level}", fix="leave it out")
    if algorithm.skip_actor_forward_only:
        raise ConfigError("tis_batch_normalize needs the old log-probs of the whole step before its first micro-batch",
                          code="tis-normalize-needs-old-log-probs", who="[tis], algorithm.skip_actor_forward_only",
                          fix="drop one of them")
