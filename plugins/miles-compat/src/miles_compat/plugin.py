"""The plugin: options that name functions, and the hooks that call them. What needs torch is imported when called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from miles_megatron.layout import layout_of

from miles_compat.args import Args
from miles_compat.paths import SHAPES, function_at
from miles_core.config import RunConfig, option
from miles_core.errors import ConfigError
from miles_core.hookspecs import hookimpl
from miles_core.plugins.resolve import choices

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import torch

    from miles_compat.records import Checkpoints
    from miles_compat.source import Source
    from miles_core.columns import Packed
    from miles_core.stages.loss import LossInputs, Metrics, TokenWeights
    from miles_core.stages.rollout import Generation
    from miles_core.stages.step import TrainerAccess
    from miles_core.types import Batch, Drop, Group, Prompt, Sample


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
    data_source_path: str | None = option(
        None, "Class of a data source; chosen by --prompt-source custom.", flags=("--data-source-path",)
    )
    custom_generate_function_path: str | None = option(
        None, "Makes a sample; chosen by --generate custom.", flags=("--custom-generate-function-path",)
    )
    custom_rm_path: str | None = option(
        None, "Scores a sample; chosen by --rm-type custom.", flags=("--custom-rm-path",)
    )
    dynamic_sampling_filter_path: str | None = option(
        None, "Keeps or drops each group.", flags=("--dynamic-sampling-filter-path",)
    )
    buffer_filter_path: str | None = option(
        None, "Selects which of the groups that were called back go on.", flags=("--buffer-filter-path",)
    )
    rollout_sample_filter_path: str | None = option(
        None, "Marks samples of a rollout that are not trained on.", flags=("--rollout-sample-filter-path",)
    )
    rollout_all_samples_process_path: str | None = option(
        None, "Sees every group that was finished, also those that a filter dropped.",
        flags=("--rollout-all-samples-process-path",),
    )
    custom_reward_post_process_path: str | None = option(
        None, "Changes the rewards of a whole rollout.", flags=("--custom-reward-post-process-path",)
    )
    custom_advantage_function_path: str | None = option(
        None, "Computes the advantages; chosen by --advantage-estimator custom.",
        flags=("--custom-advantage-function-path",),
    )
    rollout_data_postprocess_path: str | None = option(
        None, "Called after the advantages, which it may change.", flags=("--rollout-data-postprocess-path",)
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
    custom_megatron_post_save_hook_path: str | None = option(
        None, "Called when a checkpoint is complete.", flags=("--custom-megatron-post-save-hook-path",)
    )
    custom_rollout_log_function_path: str | None = option(
        None, "Told of every rollout.", flags=("--custom-rollout-log-function-path",)
    )
    custom_eval_rollout_log_function_path: str | None = option(
        None, "Told of every evaluation.", flags=("--custom-eval-rollout-log-function-path",)
    )


class Compat:
    """Functions named by path, as in launch scripts of Miles and slime, called by hooks."""


    def __init__(self, options: CompatOptions, config: RunConfig):
        _check(options, config)
        self.options, self.args, self.algorithm = options, Args(config), config.algorithm
        paths = {name: getattr(options, name) for name in SHAPES}
        self.functions = {name: function_at(name, path) for name, path in paths.items() if path is not None}
        self._config, self._source = config, None
        self._scoring: TrainerAccess | None = None
        self._begun: set[str] = set()
        self._finished: list[Group] = []
        self._checkpoints: Checkpoints | None = None

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
        """rollout_data_postprocess_path, before a rollout's first step; custom_megatron_before_train_step_hook_path."""
        if access.index == 0 and (function := self._function("rollout_data_postprocess_path")):
            from miles_compat.rollout import postprocessed

            postprocessed(function, self.args, access.batch, self.algorithm)
        if function := self._function("custom_megatron_before_train_step_hook_path"):
            function(self.args, access.batch.rollout_id, access.index, access.chunks("actor"),
                     access.optimizer("actor"), access.scheduler("actor"))
        return proceed()

    @hookimpl(name="custom")
    def prompt_source(self, config: RunConfig, tokenizer: object) -> Source:
        """data_source_path."""
        from miles_compat.source import source_of

        found = source_of(self.functions["data_source_path"], self.args, config, tokenizer,
                          str(self.options.data_source_path))
        self._source = found.inner
        return found

    @hookimpl(name="custom")
    async def generate(self, prompt: Prompt, generation: Generation) -> list[Sample]:
        """custom_generate_function_path."""
        from miles_compat.generation import group

        return await group(self.functions["custom_generate_function_path"], self.args, prompt, generation)

    @hookimpl("reward", name="custom")
    async def score(self, samples: list[Sample]) -> list[float]:
        """custom_rm_path."""
        from miles_compat.rewards import scores

        return await scores(self.functions["custom_rm_path"], self.args, samples)

    @hookimpl
    def filter_group(self, group: Group) -> Group | Drop:
        """dynamic_sampling_filter_path, what rollout_all_samples_process_path sees, samples that a scorer removes."""
        if any("remove_sample" in sample.metadata for sample in group.samples):
            from miles_compat.sample import lent

            with lent(group.samples):
                pass
        if self._function("rollout_all_samples_process_path"):
            self._finished.append(group)
        if function := self._function("dynamic_sampling_filter_path"):
            from miles_compat.rollout import kept

            return kept(function, self.args, group)
        return group

    @hookimpl
    def select_from_buffer(self, groups: list[Group], rollout_id: int) -> list[Group]:
        """buffer_filter_path."""
        if function := self._function("buffer_filter_path"):
            from miles_compat.selection import selected

            return selected(function, self.args, groups, rollout_id)
        return groups

    @hookimpl
    def shape_rewards(self, groups: list[Group]) -> list[Group]:
        """rollout_sample_filter_path, rollout_all_samples_process_path, custom_reward_post_process_path."""
        from miles_compat import rollout

        if function := self._function("rollout_sample_filter_path"):
            rollout.marked(function, self.args, groups)
        if function := self._function("rollout_all_samples_process_path"):
            finished, self._finished = self._finished, []
            rollout.processed(function, self.args, finished, self._source)
        if function := self._function("custom_reward_post_process_path"):
            rollout.post_processed(function, self.args, groups)
        return groups

    @hookimpl(name="custom")
    def advantage(self, batch: Batch) -> list[np.ndarray]:
        """custom_advantage_function_path."""
        from miles_compat.rollout import advantages

        return advantages(self.functions["custom_advantage_function_path"], self.args, batch, self.algorithm)

    @hookimpl(name="custom_loss")
    def policy_loss(self, inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
        """custom_loss_function_path."""
        found: tuple[torch.Tensor, Metrics] = self.functions["custom_loss_function_path"](self.args, inputs)
        return found

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

    @hookimpl
    def metrics(self, rollout_id: int, values: dict[str, float], run_dir: Path) -> None:
        """custom_rollout_log_function_path, custom_eval_rollout_log_function_path; a look for new checkpoints."""
        from miles_compat.records import Checkpoints, logged

        logged(self._function("custom_rollout_log_function_path"),
               self._function("custom_eval_rollout_log_function_path"), self.args, rollout_id, values, run_dir)
        if self._checkpoints is None:
            self._checkpoints = Checkpoints(self._config)
        self.finish()

    @hookimpl
    def finish(self) -> None:
        """custom_megatron_post_save_hook_path, in the role that is told of metrics."""
        function = self._function("custom_megatron_post_save_hook_path")
        if function and self._checkpoints is not None:
            self._checkpoints.tell(function, self.args)

    def _function(self, name: str) -> Callable[..., Any] | None:
        return self.functions.get(name)


PARTS = (
    ("data_source_path", "prompt_source", "custom", "--prompt-source custom"),
    ("custom_generate_function_path", "generate", "custom", "--generate custom"),
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
        if path is not None and not used and (trains or hook in ("prompt_source", "generate", "reward")):
            raise ConfigError(f"nothing calls the function of {key}", got=path, who="plugin compat", fix=f"add {flag}")
    if options.custom_reward_post_process_path and "algorithm.rewards_normalization" not in config.origin:
        raise ConfigError("custom_reward_post_process_path leaves open whether the estimator still compares rewards "
                          "within their group", who="plugin compat",
                          fix="--disable-rewards-normalization is what Miles does, --rewards-normalization does both")
    if options.rollout_all_samples_process_path and config.rollout.max_lag:
        raise ConfigError("rollout_all_samples_process_path is called once for each rollout, and groups of several "
                          "rollouts are sampled at once", got=f"max_lag {config.rollout.max_lag}", who="plugin compat",
                          fix="drop --max-lag, or look at each group in the hook filter_group")
    if options.custom_megatron_post_save_hook_path and not config.checkpoint.save:
        raise ConfigError("nothing is saved, so nothing calls the function of custom_megatron_post_save_hook_path",
                          who="plugin compat", fix="add --save FOLDER")
    if options.custom_tis_function_path and config.options.get("tis", {}).get("use_tis"):
        raise ConfigError("use_tis and custom_tis_function_path would both weigh the tokens", who="[tis], [compat]",
                          fix="drop --use-tis: the path alone is enough")
    if options.custom_tis_function_path and layout_of(config).context > 1:
        raise ConfigError("custom_tis_function_path is given whole samples, and context parallelism cuts them",
                          got=f"context_parallel_size {layout_of(config).context}", who="plugin compat",
                          fix="take an option of plugin tis, or write the hook token_weights, which has segment_sum")
