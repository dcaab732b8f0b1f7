"""What must hold between the functions that a run names and its options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles_megatron.layout import layout_of

from miles_compat.paths import SHAPES
from miles_core.errors import ConfigError
from miles_core.plugins.resolve import choices

if TYPE_CHECKING:
    from miles_core.config import RunConfig

PARTS = (
    ("data_source_path", "prompt_source", "custom", "--prompt-source custom"),
    ("custom_generate_function_path", "generate", "custom", "--generate custom"),
    ("custom_rm_path", "reward", "custom", "--rm-type custom"),
    ("custom_advantage_function_path", "advantage", "custom", "--advantage-estimator custom"),
    ("custom_loss_function_path", "policy_loss", "custom_loss", "--loss-type custom_loss"),
    ("custom_pg_loss_reducer_function_path", "reduction", "custom", "--reduction custom"),
)


def check(options: Any, config: RunConfig) -> None:
    """
    Raises:
        ConfigError: a function that nobody would call, a part without its function, or two that do the same.
    """
    picked = {(hook, name) for hook, name, _ in choices(config)}
    trains = not config.debug.debug_rollout_only
    whole = bool(options.rollout_function_path)
    instead = {"data_source_path": whole, "custom_generate_function_path": whole or bool(options.eval_function_path)}
    for key, hook, name, flag in PARTS:
        path, used = getattr(options, key), (hook, name) in picked
        if used and path is None and not instead.get(key):
            raise ConfigError(f"{flag} needs a function", code="function-path-required", who="plugin compat",
                              fix=f"--{key.replace('_', '-')} ./file.py:function, of {SHAPES[key].text}")
        asked = whole and hook in ("generate", "reward")  # by the rollout function
        if path is not None and not used and not asked and (trains or hook in ("prompt_source", "generate", "reward")):
            raise ConfigError(f"nothing calls the function of {key}", code="function-never-called", got=path,
                              who="plugin compat", fix=f"add {flag}")
    _check_functions(options, config)
    _check_rewards(options, config)
    if options.custom_megatron_post_save_hook_path and not config.checkpoint.save:
        raise ConfigError("nothing is saved, so nothing calls the function of custom_megatron_post_save_hook_path",
                          who="plugin compat", code="post-save-function-never-called", fix="add --save FOLDER")
    if options.custom_tis_function_path and config.options.get("tis", {}).get("use_tis"):
        raise ConfigError("use_tis and custom_tis_function_path would both weigh the tokens", who="[tis], [compat]",
                          fix="drop --use-tis: the path alone is enough", code="tis-applied-twice")
    parts = config.options.get(config.perf.trainer, {}).get("context_parallel_size", layout_of(config).context)
    if options.custom_tis_function_path and isinstance(parts, int) and parts > 1:
        raise ConfigError("custom_tis_function_path is given whole samples, and context parallelism cuts them",
                          code="tis-function-context-parallel", got=f"context_parallel_size {parts}",
                          who="plugin compat",
                          fix="take an option of plugin tis, or write the hook token_weights, which has segment_sum")


GENERATED = ("eval_function_path", "rollout_sample_hook_path", "custom_agent_function_path", "generate_tool_specs_path",
             "generate_execute_tool_function_path")
"""Options that the generator custom looks at."""
MEGATRONS = ("custom_megatron_init_path", "custom_model_provider_path", "custom_update_weight_post_write_path")
"""Functions that Megatron's trainer alone calls."""


def _check_functions(options: Any, config: RunConfig) -> None:
    for keys, part, chosen, caller in ((GENERATED, "generate", config.rollout.generate, "custom"),
                                       (MEGATRONS, "trainer", config.perf.trainer, "megatron")):
        for key in keys if chosen != caller else ():
            if getattr(options, key):
                raise ConfigError(f"nothing calls the function of {key}", code="function-never-called",
                                  who="plugin compat", got=f"--{part} {chosen}",
                                  fix=f"--{part} {caller}, or leave the function out")
    if options.custom_update_weight_post_write_path and not str(config.perf.weight_sync).startswith("disk"):
        raise ConfigError("no weights are written to files, so nothing calls the function of "
                          "custom_update_weight_post_write_path",
                          code="post-write-function-never-called", got=f"--weight-sync {config.perf.weight_sync}",
                          who="plugin compat", fix="--weight-sync disk or disk-delta, with --update-weight-disk-dir")
    if options.rollout_function_path and options.data_source_path:
        raise ConfigError("a rollout function is given a data source of the run's prompts",
                          code="rollout-function-data-source", got="data_source_path, too", who="plugin compat",
                          fix="drop --data-source-path: the function may make a source itself")
    if options.eval_function_path and not (config.eval.eval_prompt_data or config.eval.datasets):
        raise ConfigError("nothing calls the eval function, as there are no eval datasets",
                          code="eval-function-never-called", who="plugin compat", got=options.eval_function_path,
                          fix="--eval-prompt-data NAME PATH, or --eval-config")


def _check_rewards(options: Any, config: RunConfig) -> None:
    own = options.custom_reward_post_process_path or options.custom_convert_samples_to_train_data_path
    if own and "algorithm.rewards_normalization" not in config.origin:
        raise ConfigError("the function leaves open whether the estimator still compares rewards within their group",
                          code="reward-function-group-unclear", got=own, who="plugin compat",
                          fix="--disable-rewards-normalization is what Miles does, --rewards-normalization does both")
    if options.rollout_all_samples_process_path and config.rollout.max_lag:
        raise ConfigError("rollout_all_samples_process_path is called for each rollout, and several are under way",
                          code="all-samples-function-max-lag", got=f"max_lag {config.rollout.max_lag}",
                          who="plugin compat", fix="drop --max-lag, or look at each group in the hook filter_group")
