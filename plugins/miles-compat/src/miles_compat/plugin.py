"""The plugin: options that name functions, and the hooks that call them. What needs torch is imported when called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from miles_flags.settings import custom_config

from miles_compat.args import Args
from miles_compat.checks import check
from miles_compat.paths import SHAPES, function_at
from miles_core.config import RunConfig, option
from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import torch

    from miles_compat.records import Checkpoints
    from miles_compat.schedule import Evaluations, Places, Schedule
    from miles_core.columns import Packed
    from miles_core.stages.loss import LossInputs, Metrics, TokenWeights
    from miles_core.stages.prompts import PromptSource, Records
    from miles_core.stages.rollout import Generation
    from miles_core.stages.step import TrainerAccess
    from miles_core.types import Batch, Drop, Group, Prompt, Sample


@dataclass(frozen=True, kw_only=True)
class CompatOptions:
    """Functions by path, as package.module.function or ./file.py:function. The README says how each is called."""

    custom_megatron_init_path: str | None = option(
        None, "Called once Megatron's process groups exist.", flags=("--custom-megatron-init-path",))
    custom_megatron_before_log_prob_hook_path: str | None = option(
        None, "Called before the log-probs of each model.", flags=("--custom-megatron-before-log-prob-hook-path",))
    custom_megatron_before_train_step_hook_path: str | None = option(
        None, "Called before every optimizer step.", flags=("--custom-megatron-before-train-step-hook-path",))
    data_source_path: str | None = option(
        None, "Class of a data source; chosen by --prompt-source custom.", flags=("--data-source-path",))
    custom_generate_function_path: str | None = option(
        None, "Makes a sample; chosen by --generate custom.", flags=("--custom-generate-function-path",))
    custom_rm_path: str | None = option(
        None, "Scores a sample; chosen by --rm-type custom.", flags=("--custom-rm-path",))
    dynamic_sampling_filter_path: str | None = option(
        None, "Keeps or drops each group.", flags=("--dynamic-sampling-filter-path",))
    buffer_filter_path: str | None = option(
        None, "Selects which cancelled groups continue.", flags=("--buffer-filter-path",))
    rollout_sample_filter_path: str | None = option(
        None, "Marks samples of a rollout that are not trained on.", flags=("--rollout-sample-filter-path",))
    rollout_all_samples_process_path: str | None = option(
        None, "Called with every finished group, including filtered ones.",
        flags=("--rollout-all-samples-process-path",))
    custom_reward_post_process_path: str | None = option(
        None, "Changes the rewards of a whole rollout.", flags=("--custom-reward-post-process-path",))
    custom_advantage_function_path: str | None = option(
        None, "Computes the advantages; chosen by --advantage-estimator custom.",
        flags=("--custom-advantage-function-path",))
    rollout_data_postprocess_path: str | None = option(
        None, "Called after the advantages, which it may change.", flags=("--rollout-data-postprocess-path",))
    custom_loss_function_path: str | None = option(
        None, "The loss of each token; chosen by --loss-type custom_loss.", flags=("--custom-loss-function-path",))
    custom_tis_function_path: str | None = option(
        None, "Weighs and masks the tokens of the policy loss.", flags=("--custom-tis-function-path",))
    custom_pg_loss_reducer_function_path: str | None = option(
        None, "Makes the reducer of the loss; chosen by --reduction custom.",
        flags=("--custom-pg-loss-reducer-function-path",))
    custom_megatron_post_save_hook_path: str | None = option(
        None, "Called when a checkpoint is complete.", flags=("--custom-megatron-post-save-hook-path",))
    custom_rollout_log_function_path: str | None = option(
        None, "Called after every rollout.", flags=("--custom-rollout-log-function-path",))
    custom_eval_rollout_log_function_path: str | None = option(
        None, "Called after every evaluation.", flags=("--custom-eval-rollout-log-function-path",))
    rollout_function_path: str | None = option(
        None, "Samples, scores and filters whole rollouts.", flags=("--rollout-function-path",))
    rollout_global_dataset: bool = option(
        True, "The run has prompts; off (--disable-rollout-global-dataset): a rollout function brings its own.",
        flags=("--rollout-global-dataset",))
    eval_function_path: str | None = option(
        None, "Evaluates; the run samples the datasets that it does not return.", flags=("--eval-function-path",))
    custom_agent_function_path: str | None = option(
        None, "Talks to the model over an OpenAI endpoint; its answers are the sample.",
        flags=("--custom-agent-function-path",))
    session_sample_picker_path: str | None = option(
        None, "Selects the samples of an agent's session to train on.", flags=("--session-sample-picker-path",))
    session_sample_postprocessor_path: str | None = option(
        None, "Changes rewards and masks of an agent's samples.", flags=("--session-sample-postprocessor-path",))
    session_message_matcher: str = option(
        "strict", "Which messages of a session count as the same: strict, loose_tool_call, role_content_only, or a "
        "function's path.", flags=("--session-message-matcher",))
    custom_update_weight_post_write_path: str | None = option(
        None, "Called when a version of the weights is written to files.",
        flags=("--custom-update-weight-post-write-path",))
    generate_tool_specs_path: str | None = option(
        None, "List of the tools that conversations have, as functions of OpenAI's.",
        flags=("--generate-tool-specs-path",))
    generate_execute_tool_function_path: str | None = option(
        None, "Answers a call of a tool.", flags=("--generate-execute-tool-function-path",))
    generate_tool_call_parser: str | None = option(
        None, "How calls are written: qwen25, JSON in <tool_call>.", flags=("--generate-tool-call-parser",))
    rollout_sample_hook_path: list[str] = option(
        [], "Called for each sample before it is scored, one after the other.", flags=("--rollout-sample-hook-path",))
    custom_convert_samples_to_train_data_path: str | None = option(
        None, "Converts the samples of a rollout to training data.",
        flags=("--custom-convert-samples-to-train-data-path",))
    custom_model_provider_path: str | None = option(
        None, "Changes the model that the trainer builds.", flags=("--custom-model-provider-path",))
    scorer: str | None = option(None, "Scorer from which a rollout function gets rewards; set by --rm-type.")
    custom_config_path: str | None = option(
        None, "YAML file whose keys functions read as attributes of args.", flags=("--custom-config-path",))


class Compat:
    """Functions named by path, as in launch scripts of Miles and slime, called by hooks."""

    provides = ("hf-modules",)  # which it leaves as they are: a function that changes the model is Megatron's

    def __init__(self, options: CompatOptions, config: RunConfig,
                 log: Callable[[str, float], None] = lambda name, value: None):
        check(options, config)
        self.options, self.algorithm = options, config.algorithm
        self.args = Args(config, custom_config(options.custom_config_path))
        paths = {name: getattr(options, name) for name in SHAPES}
        self.functions = {name: function_at(name, path) for name, path in paths.items() if path is not None}
        for function in self.functions.values():
            self.args.add_defaults(function)
        self._config, self._source, self._log = config, None, log
        self._places: Places | None = None
        self._schedule: Schedule | None = None
        self._evaluations: Evaluations | None = None
        self._scoring: TrainerAccess | None = None
        self._begun: set[str] = set()
        self._finished: list[Group] = []
        self._checkpoints: Checkpoints | None = None

    @hookimpl
    def megatron_init(self, config: RunConfig) -> None:
        """custom_megatron_init_path; custom_update_weight_post_write_path is announced to what writes weights."""
        if function := self._function("custom_megatron_init_path"):
            function(self.args)
        if written := self._function("custom_update_weight_post_write_path"):
            from miles_core.stages.sync import WRITTEN

            WRITTEN.set(lambda folder, servers: written(self.args, str(folder), list(servers)))

    @hookimpl
    def build_model(self, chunk: torch.nn.Module, spec: object, folder: Path, model: str,
                    weight_map: object) -> torch.nn.Module:
        """custom_model_provider_path, of the actor."""
        if model == "actor" and (function := self._function("custom_model_provider_path")):
            from miles_compat.model import provided

            return provided(function, self.args, chunk)
        return chunk

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
    def prompt_source(self, config: RunConfig, tokenizer: object, read: Callable[[str], Records]) -> PromptSource:
        """data_source_path; places in rollouts for rollout_function_path."""
        self.args._made["read"] = read
        if self._function("rollout_function_path"):
            from miles_compat.data_sources import prompts_of
            from miles_compat.schedule import Places

            self._places = Places(prompts_of(self.args), self.args.rollout_batch_size)
            return self._places
        from miles_compat.source import source_of

        found = source_of(self.functions["data_source_path"], self.args, config, tokenizer,
                          str(self.options.data_source_path))
        self._source = found.inner
        return found

    @hookimpl(name="custom")
    async def generate(self, prompt: Prompt, generation: Generation) -> list[Sample]:
        """rollout_function_path and eval_function_path; else custom_generate_function_path, or one engine call."""
        if prompt.stream == "train" and self._places is not None:
            return await self._rollouts(self._places).group(prompt, generation)
        if prompt.stream != "train" and (evaluations := self._evaluated()) is not None:
            found = await evaluations.group(prompt, generation)
            if found is not None:
                return found
        function = self._function("custom_generate_function_path")
        if function is None:
            from miles_core.stages.rollout import single_turn

            return await single_turn(prompt, generation)
        from miles_compat.generation import group

        return await group(function, self.args, prompt, generation, self._hooked)

    async def _hooked(self, sample: Any) -> Any:
        """rollout_sample_hook_path."""
        from miles_compat.own_rollout import apply_rollout_sample_hooks

        return await apply_rollout_sample_hooks(self.args, sample) if self.options.rollout_sample_hook_path else sample

    def _rollouts(self, places: Places) -> Schedule:
        if self._schedule is None:
            from miles_compat.data_sources import RolloutDataSourceWithBuffer
            from miles_compat.schedule import Schedule

            self._schedule = Schedule(self.functions["rollout_function_path"], self.args, places,
                                      lambda args: RolloutDataSourceWithBuffer(args, places.inner), self._log)
        return self._schedule

    def _evaluated(self) -> Evaluations | None:
        function = self._function("eval_function_path") or self._function("rollout_function_path")
        if function is not None and self._evaluations is None:
            from miles_compat.schedule import Evaluations

            self._evaluations = Evaluations(function, self.args, self._log)
        return self._evaluations

    @hookimpl("reward", name="generated")
    async def given(self, sample: Sample) -> float:
        """The reward that the function which made a sample gave it; without one, that of --rm-type."""
        from miles_compat.rewards import given

        score: float = await given(self.args, sample)
        return score

    @hookimpl(name="given-first")
    def combine_rewards(self, sample: Sample, weights: dict[str, float]) -> float:
        """The reward that a generate function gave its sample; else the weighted sum of the scores."""
        from miles_core.stages.reward import weighted_sum

        return weighted_sum(sample, weights) if sample.reward is None else sample.reward

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
        if self._function("rollout_function_path"):  # which has filtered already
            return group
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
        """rollout_sample_filter_path, rollout_all_samples_process_path, custom_convert_samples_to_train_data_path,
        custom_reward_post_process_path."""
        from miles_compat import rollout

        own = self._function("rollout_function_path")  # which has called these two itself
        if (function := self._function("rollout_sample_filter_path")) and not own:
            rollout.marked(function, self.args, groups)
        if (function := self._function("rollout_all_samples_process_path")) and not own:
            finished, self._finished = self._finished, []
            rollout.processed(function, self.args, finished, self._source)
        if function := self._function("custom_convert_samples_to_train_data_path"):
            rollout.converted(function, self.args, groups)
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
