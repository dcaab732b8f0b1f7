"""The plugin: options, the critic, hooks. The estimator is in gae.py, the critic's loss in critic.py, both imported
when first used."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from miles_core.columns import Align, Column
from miles_core.config import RunConfig, option
from miles_core.errors import ConfigError
from miles_core.hookspecs import hookimpl
from miles_core.stages.models import Model

if TYPE_CHECKING:
    import torch

    from miles_core.stages.advantage import Values
    from miles_core.stages.loss import LossInputs, Metrics
    from miles_core.stages.step import TrainerAccess
    from miles_core.types import Batch


@dataclass(frozen=True, kw_only=True)
class PpoOptions:
    """The critic. Discount, lambda, KL, clip band and whitening are options of [algorithm]."""

    gae: Literal["chunked", "vanilla"] = option(
        "chunked", "How advantages are computed: in chunks of 128 tokens, or one by one.", flags=("--gae",)
    )
    value_clip: float = option(
        0.2, "Clip range: how far a value may move from the old one before its loss becomes constant.",
        flags=("--value-clip",)
    )
    num_critic_only_steps: int = option(
        0, "Rollouts at the start in which the critic trains alone.", within=(0,), flags=("--num-critic-only-steps",)
    )
    critic_load: str | None = option(
        None, "Where the critic's first weights come from; default: --hf-checkpoint with a fresh value head.",
        flags=("--critic-load",),
    )
    critic_lr: float | None = option(None, "The critic's learning rate; default: --lr.", flags=("--critic-lr",))
    critic_lr_warmup_iters: int = option(
        0, "Optimizer steps of the critic's linear warm-up.", within=(0,), flags=("--critic-lr-warmup-iters",)
    )


def _check(options: PpoOptions, config: RunConfig) -> None:
    """
    Raises:
        ConfigError: a critic that no estimator uses, or that would not learn.
    """
    algorithm, last = config.algorithm, config.rollout.num_rollout
    if algorithm.advantage_estimator != "ppo" or algorithm.loss_type == "sft_loss":
        raise ConfigError("plugin ppo would train a critic that no estimator uses", got=algorithm.advantage_estimator,
                          who="algorithm.advantage_estimator, algorithm.loss_type", code="ppo-critic-unused",
                          fix="write --advantage-estimator ppo, or leave the plugin and its options out")
    if not options.value_clip > 0:
        raise ConfigError("value_clip should be above 0: the critic's loss would not move it", got=options.value_clip,
                          who="ppo.value_clip", code="ppo-value-clip-out-of-range", fix="use 0.2, for example")
    if options.critic_lr is not None and options.critic_lr != 0 and not 1e-12 <= options.critic_lr <= 0.1:
        raise ConfigError("critic_lr should be 0, or from 1e-12 to 0.1", got=options.critic_lr, who="ppo.critic_lr",
                          fix="use 1e-5, for example", code="ppo-critic-lr-out-of-range")
    if last and options.num_critic_only_steps >= last and config.checkpoint.save is None:
        raise ConfigError("the critic would train alone until the run ends, and no result of it would be saved",
                          got=f"{options.num_critic_only_steps} of {last} rollouts", who="ppo.num_critic_only_steps",
                          fix="lower --num-critic-only-steps, or add --save", code="ppo-warm-up-fills-run")


class Ppo:
    """Proximal policy optimization: advantages from a critic that trains beside the actor (PPO, arXiv:1707.06347)."""

    provides = ("weights:critic_load", "trains:critic_load")

    def __init__(self, options: PpoOptions, config: RunConfig):
        _check(options, config)
        self.options, self.config = options, config

    @hookimpl
    def columns(self) -> Iterable[Column]:
        """What the critic said before the rollout's first step, and what it should have said."""
        return [Column(name, Align.RESPONSE, missing="pad", owner="ppo") for name in ("values", "returns")]

    @hookimpl
    def models(self) -> dict[str, Model]:
        """The critic."""
        options, config = self.options, self.config
        rate = config.optimizer.lr if options.critic_lr is None else options.critic_lr
        return {"critic": Model(
            options.critic_load or str(config.checkpoint.hf_checkpoint), head="value", trainable=True,
            optimizer={"lr": rate, "lr_warmup_iters": options.critic_lr_warmup_iters, "lr_warmup_fraction": 0.0},
        )}  # fmt: skip

    @hookimpl
    def log_prob(self, proceed: Callable[[], dict[str, float]], access: TrainerAccess) -> dict[str, float]:
        """Beside the log-probs, the critic's values of every trained token."""
        from miles_ppo.critic import trained

        metrics, begin = proceed(), time.perf_counter()
        access.forward("critic", lambda rows: {"values": rows.values()})
        values = trained(access.samples, "values")
        if values.size:
            metrics["rollout/values"] = float(values.mean())
        return metrics | {"perf/values_time": time.perf_counter() - begin}

    @hookimpl(name="ppo")
    def advantage(self, batch: Batch) -> Values:
        """Generalised advantage estimation (arXiv:1506.02438, eq. 16); fills the column `returns` on the way."""
        from miles_ppo.gae import ESTIMATORS, advantages_and_returns

        return advantages_and_returns(batch, self.config.algorithm, ESTIMATORS[self.options.gae])

    @hookimpl
    def train_step(self, proceed: Callable[[], dict[str, float]], access: TrainerAccess) -> dict[str, float]:
        """The critic's step, then the actor's, which waits while the critic warms up."""
        from miles_ppo.critic import clipped_value_loss, return_metrics

        def value_loss(inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
            return clipped_value_loss(inputs, self.options.value_clip)

        begin = time.perf_counter()
        metrics = access.step("critic", value_loss)
        metrics["perf/critic_train_time"] = time.perf_counter() - begin
        if access.index == 0:
            metrics |= return_metrics(access.batch.samples)
        if access.batch.rollout_id >= self.options.num_critic_only_steps:
            metrics |= proceed()
        return metrics
