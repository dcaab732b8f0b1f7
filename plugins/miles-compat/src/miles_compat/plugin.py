"""The plugin: options that name functions, and the hooks that call them. What needs torch is imported when called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles_compat.args import Args
from miles_compat.paths import SHAPES, function_at
from miles_core.backends.megatron.layout import layout_of
from miles_core.config import RunConfig, option
from miles_core.errors import ConfigError
from miles_core.hookspecs import hookimpl
from miles_core.plugins.resolve import choices

if TYPE_CHECKING:
    import numpy as np
    import torch

    from miles_core.columns import Packed
    from miles_core.stages.loss import LossInputs, Metrics, TokenWeights
    from miles_core.stages.step import TrainerAccess
    from miles_core.types import Batch, Group, Sample


@dataclass(frozen=True, kw_only=True)
class CompatOptions:
    """Functions by path, as package.module.function or ./file.py:function. The README says how each is called."""

    custom_megatron_init_path: str | None = option(
        None, "Called once Megatron's process groups exist.", flags=("--custom-megatron-init-path",)
    )
    custom_megatron_before_log_prob_hook_path: str | None = option(
        None, "Called before the log-probs of each model.", flags=("--custom-megatron-before-log-prob-hook-path",)
    )
    custom_megatron_before_train_step_hook_path: str | None = option(
        None, "Called before every optimizer step.", flags=("--custom-megatron-before-train-step-hook-path",)
    )
    custom_rm_path: str | None = option(
        None, "Scores a sample; chosen by --rm-type custom.", flags=("--custom-rm-path",)
    )
    buffer_filter_path: str | None = option(
        None, "Selects which of the groups that were called back go on.", flags=("--buffer-filter-path",)
    )
    custom_reward_post_process_path: str | None = option(
        None, "Changes the rewards of a whole rollout.", flags=("--custom-reward-post-process-path",)
    )
    custom_advantage_function_path: str | None = option(
        None, "Computes the advantages; chosen by --advantage-estimator custom.",
        flags=("--custom-advantage-function-path",),
    )
    custom_loss_function_path: str | None = option(
        None, "The loss of each token; chosen by --loss-type custom_loss.", flags=("--custom-loss-function-path",)
    )
    custom_tis_function_path: str | None = option(
        None, "Weighs and masks the tokens of the policy loss.", flags=("--custom-tis-function-path",)
    )
    custom_pg_loss_reducer_function_path: str | None = option(
        None, "Makes the reducer of the loss; chosen by --reduction custom.",
        flags=("--custom-pg-loss-reducer-function-path",),
    )


class Compat:
    """Functions named by path, as in launch scripts of Miles and slime, called by hooks."""

    refuses = (
        {"when": {"compat.custom_rm_path": {"set": True}, "reward": {"not": "custom"}},
         "what": "nothing calls the function of custom_rm_path",
         "fix": "add --rm-type custom"},
        {"when": {"reward": "custom", "compat.custom_rm_path": {"set": False}},
         "what": "--rm-type custom needs a function",
         "fix": "--custom-rm-path ./file.py:function, of reward(args, sample) -> float"},
        {"when": {"compat.custom_advantage_function_path": {"set": True}, "advantage": {"not": "custom"},
                  "debug.debug_rollout_only": False},
         "what": "nothing calls the function of custom_advantage_function_path",
         "fix": "add --advantage-estimator custom"},
        {"when": {"advantage": "custom", "compat.custom_advantage_function_path": {"set": False}},
         "what": "--advantage-estimator custom needs a function",
         "fix": "--custom-advantage-function-path ./file.py:function, of advantage(args, rollout_data)"},
        {"when": {"compat.custom_loss_function_path": {"set": True}, "policy_loss": {"not": "custom_loss"},
                  "debug.debug_rollout_only": False},
         "what": "nothing calls the function of custom_loss_function_path",
         "fix": "add --loss-type custom_loss"},
        {"when": {"policy_loss": "custom_loss", "compat.custom_loss_function_path": {"set": False}},
         "what": "--loss-type custom_loss needs a function",
         "fix": "--custom-loss-function-path ./file.py:function, of loss(args, inputs)"},
        {"when": {"compat.custom_pg_loss_reducer_function_path": {"set": True}, "reduction": {"not": "custom"},
                  "debug.debug_rollout_only": False},
         "what": "nothing calls the function of custom_pg_loss_reducer_function_path",
         "fix": "add --reduction custom"},
        {"when": {"reduction": "custom", "compat.custom_pg_loss_reducer_function_path": {"set": False}},
         "what": "--reduction custom needs a function",
         "fix": "--custom-pg-loss-reducer-function-path ./file.py:function, of reducer(total_lengths, ...)"},
    )

    def __init__(self, options: CompatOptions, config: RunConfig):
        _check(options, config)
        self.args, self.algorithm = Args(config), config.algorithm
        paths = {name: getattr(options, name) for name in SHAPES}
        self.functions = {name: function_at(name, path) for name, path in paths.items() if path is not None}
        self._scoring: TrainerAccess | None = None
        self._begun: set[str] = set()

    @hookimpl
    def megatron_init(self, config: RunConfig) -> None:
        """custom_megatron_init_path."""
        if function := self._function("custom_megatron_init_path"):
            function(self.args)

    @hookimpl
    def log_prob(self, proceed: Callable[[], Metrics], access: TrainerAccess) -> Metrics:
        """custom_megatron_before_log_prob_hook_path: each model's first forward in here is announced to it."""
        self._scoring, self._begun = access, set()
        try:
            return proceed()
        finally:
            self._scoring = None

    @hookimpl
    def microbatch(self, proceed: Callable[[Packed], torch.Tensor], packed: Packed, model: str) -> torch.Tensor:
        """The place where the model holds the weights that it scores with."""
        function = self._function("custom_megatron_before_log_prob_hook_path")
        if function and self._scoring is not None and model not in self._begun:
            self._begun.add(model)
            function(self.args, self._scoring.chunks(model), "" if model == "actor" else f"{model}_")
        return proceed(packed)

    @hookimpl
    def train_step(self, proceed: Callable[[], Metrics], access: TrainerAccess) -> Metrics:
        """custom_megatron_before_train_step_hook_path."""
        if function := self._function("custom_megatron_before_train_step_hook_path"):
            function(self.args, access.batch.rollout_id, access.index, access.chunks("actor"),
                     access.optimizer("actor"), access.scheduler("actor"))
        return proceed()

    @hookimpl("reward", name="custom")
    async def score(self, sample: Sample) -> float:
        """custom_rm_path. A plain function runs in a thread, like any plain scorer."""
        from miles_core.hosts import in_daemon_thread

        function = self.functions["custom_rm_path"]
        if inspect.iscoroutinefunction(function):
            return await function(self.args, sample)
        answer = await in_daemon_thread(lambda: function(self.args, sample))
        return await answer if inspect.isawaitable(answer) else answer

    @hookimpl
    def select_from_buffer(self, groups: list[Group], rollout_id: int) -> list[Group]:
        """buffer_filter_path."""
        if function := self._function("buffer_filter_path"):
            from miles_compat.selection import selected

            return selected(function, self.args, groups, rollout_id)
        return groups

    @hookimpl
    def shape_rewards(self, groups: list[Group]) -> list[Group]:
        """custom_reward_post_process_path."""
        if function := self._function("custom_reward_post_process_path"):
            from miles_compat.rollout import post_processed

            post_processed(function, self.args, groups)
        return groups

    @hookimpl(name="custom")
    def advantage(self, batch: Batch) -> list[np.ndarray]:
        """custom_advantage_function_path."""
        from miles_compat.rollout import advantages

        return advantages(self.functions["custom_advantage_function_path"], self.args, batch, self.algorithm)

    @hookimpl(name="custom_loss")
    def policy_loss(self, inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
        """custom_loss_function_path."""
        return self.functions["custom_loss_function_path"](self.args, inputs)

    @hookimpl
    def token_weights(self, weights: TokenWeights, inputs: LossInputs) -> TokenWeights:
        """custom_tis_function_path."""
        if function := self._function("custom_tis_function_path"):
            from miles_compat.importance import weighted

            return weighted(function, self.args, weights, inputs)
        return weights

    @hookimpl(name="custom")
    def reduction(self, samples: list[Sample]) -> np.ndarray:
        """custom_pg_loss_reducer_function_path."""
        from miles_compat.reducer import token_weights

        function = self.functions["custom_pg_loss_reducer_function_path"]
        return token_weights(function, samples, per_token=self.algorithm.calculate_per_token_loss)

    def _function(self, name: str) -> Callable | None:
        return self.functions.get(name)


PARTS = (
    ("custom_rm_path", "reward", "custom", "--rm-type custom"),
    ("custom_advantage_function_path", "advantage", "custom", "--advantage-estimator custom"),
    ("custom_loss_function_path", "policy_loss", "custom_loss", "--loss-type custom_loss"),
    ("custom_pg_loss_reducer_function_path", "reduction", "custom", "--reduction custom"),
)


def _check(options: CompatOptions, config: RunConfig) -> None:
    """
    Raises:
        ConfigError: a function that nobody would call, a part without its function, or two that do the same.
    """
    picked = {(hook, name) for hook, name, _ in choices(config)}
    trains = not config.debug.debug_rollout_only
    for key, hook, name, flag in PARTS:
        path, used = getattr(options, key), (hook, name) in picked
        if used and path is None:
            raise ConfigError(f"{flag} needs a function", who="plugin compat",
                              fix=f"--{key.replace('_', '-')} ./file.py:function, of {SHAPES[key].text}")
        if path is not None and not used and (trains or hook == "reward"):
            raise ConfigError(f"nothing calls the function of {key}", got=path, who="plugin compat", fix=f"add {flag}")
    if options.custom_reward_post_process_path and "algorithm.rewards_normalization" not in config.origin:
        raise ConfigError("custom_reward_post_process_path leaves open whether the estimator still compares rewards "
                          "within their group", who="plugin compat",
                          fix="--disable-rewards-normalization is what Miles does, --rewards-normalization does both")
    if options.custom_tis_function_path and config.options.get("tis", {}).get("use_tis"):
        raise ConfigError("use_tis and custom_tis_function_path would both weigh the tokens", who="[tis], [compat]",
                          fix="drop --use-tis: the path alone is enough")
    if options.custom_tis_function_path and layout_of(config).context > 1:
        raise ConfigError("custom_tis_function_path is given whole samples, and context parallelism cuts them",
                          got=f"context_parallel_size {layout_of(config).context}", who="plugin compat",
                          fix="take an option of plugin tis, or write the hook token_weights, which has segment_sum")
