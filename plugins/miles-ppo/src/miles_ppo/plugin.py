"""The plugin: options, the critic, hooks. The estimator is in gae.py, the critic's loss in critic.py, both imported
when first used."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from miles_core.columns import Align, Column
from miles_core.config import RunConfig, option
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
        "chunked", "How advantages are computed: 128 tokens at once, or one by one.", flags=("--gae",)
    )
    value_clip: float = option(
        0.2, "How far a value may move from the old one before its loss stops caring.", flags=("--value-clip",)
    )
    num_critic_only_steps: int = option(
        0, "Rollouts at the start in which the critic trains alone.", flags=("--num-critic-only-steps",)
    )
    critic_load: str | None = option(
        None, "Where the critic's first weights come from; default: --hf-checkpoint with a fresh value head.",
        flags=("--critic-load",),
    )
    critic_lr: float | None = option(None, "The critic's learning rate; default: --lr.", flags=("--critic-lr",))
    critic_lr_warmup_iters: int = option(
        0, "Optimizer steps of the critic's linear warm-up.", flags=("--critic-lr-warmup-iters",)
    )


class Ppo:
    """Proximal policy optimization: advantages from a critic that trains beside the actor (PPO, arXiv:1707.06347)."""

    provides = ("weights:critic_load:score.weight",)
    refuses = (
        {"when": {"ppo.critic_load/config.json/quantization_config/quant_method": {"set": True}},
         "what": "the critic trains, and its weights are quantised", "fix": "name the plain checkpoint"},
        {"when": {"ppo.critic_load/config.json/vocab_size": {"below": "architecture.vocab"}},
         "what": "the critic knows fewer tokens than the policy", "fix": "name a critic of the policy's family"},
        {"when": {"ppo.critic_load/config.json/architectures": {"like": ".*ForCausalLM"},
                  "ppo.critic_load/config.json/hidden_size": {"apart": "architecture.hidden"},
                  "ppo.critic_load": {"lacks": "model.safetensors"},
                  "ppo.critic_load/model.safetensors.index.json": {"set": False}},
         "what": "the critic is a policy of another size, without the value head of one",
         "fix": "name a critic that was trained, or leave --critic-load out: a fresh head on --hf-checkpoint"},
        {"when": {"ppo.critic_load": {"missing": True}},
         "what": "there is no such checkpoint of a critic", "fix": "name a folder, or leave --critic-load out"},
        {"when": {"algorithm.advantage_estimator": {"not": "ppo"}},
         "what": "plugin ppo would train a critic that nobody asks",
         "fix": "write --advantage-estimator ppo, or leave the plugin and its options out"},
        {"when": {"algorithm.loss_type": "sft_loss"},
         "what": "plugin ppo would train a critic that nobody asks",
         "fix": "leave the plugin and its options out, or drop --loss-type sft_loss"},
        {"when": {"ppo.value_clip": {"outside": "(0, inf)"}},
         "what": "value_clip should be above 0", "fix": "0.2 is usual"},
        {"when": {"ppo.critic_lr": {"outside": "[0, 0.1)"}},
         "what": "critic_lr should lie in [0, 0.1)", "fix": "1e-5 is usual"},
        {"when": {"ppo.critic_lr": {"above": 0, "below": 1e-12}},
         "what": "steps of this size are lost where float32 is rounded, and the critic would not change",
         "fix": "1e-5 is usual"},
        {"when": {"checkpoint.save_hf": {"is": "ppo.critic_load"}},
         "what": "the export would overwrite the critic", "fix": "name another folder with --save-hf"},
        {"when": {"ppo.num_critic_only_steps": {"outside": "[0, inf)"}},
         "what": "num_critic_only_steps should be at least 0", "fix": "leave it out for none"},
        {"when": {"ppo.num_critic_only_steps": {"from": "rollout.num_rollout"}, "rollout.num_rollout": {"above": 0},
                  "checkpoint.save": {"set": False}},
         "what": "the critic would train alone until the run ends, and nothing would be kept of it",
         "fix": "lower --num-critic-only-steps, or add --save"},
        {"when": {"ppo.critic_lr_warmup_iters": {"from": "rollout.num_rollout"}, "rollout.num_rollout": {"above": 0},
                  "rollout.num_steps_per_rollout": 1},
         "what": "the run is over when the critic's warm-up is", "fix": "lower --critic-lr-warmup-iters"},
        {"when": {"ppo.critic_lr_warmup_iters": {"outside": "[0, inf)"}},
         "what": "critic_lr_warmup_iters should be at least 0", "fix": "leave it out for none"},
    )

    def __init__(self, options: PpoOptions, config: RunConfig):
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
            optimizer={"lr": rate, "lr_warmup_iters": options.critic_lr_warmup_iters},
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
