"""Settings that do not go together, though each alone would do: lag, scorers, evaluations, checkpoints, replays."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from miles_core.config.load import who
from miles_core.config.tables import RunConfig
from miles_core.errors import BatchError, ConfigError

Note = Callable[[str], None]


def check_settings(config: RunConfig, note: Note) -> None:
    """
    Raises:
        ConfigError, BatchError: names the settings and who made them.
    """
    _staleness(config, note)
    _scorers(config)
    _evaluation(config, note)
    _checkpoints(config, note)
    _places(config)


def _staleness(config: RunConfig, note: Note) -> None:
    rollout = config.rollout
    limit, most = rollout.max_weight_staleness, rollout.async_max_concurrent_samples
    if limit == 0 and rollout.max_lag:
        raise ConfigError("no sample may be stale, and sampling may run ahead of training",
                          got=f"max_weight_staleness = 0, max_lag = {rollout.max_lag}",
                          who=who(config, "rollout.max_weight_staleness", "rollout.max_lag"),
                          fix="set max_lag = 0, or allow a staleness of 1 or more")
    if limit is not None and limit < rollout.max_lag:
        note(f"max_weight_staleness {limit} is below max_lag {rollout.max_lag}: sampling runs {limit} rollout(s) ahead")
    if rollout.max_lag and not config.algorithm.use_rollout_logprobs:
        note(f"samples are up to {rollout.max_lag} versions old when they are trained on, and ratios are those to the "
             "weights before the step: --use-rollout-logprobs makes them those to the weights that were sampled from, "
             "--use-tis weights the difference")
    if most is not None and most < rollout.n_samples_per_prompt:
        raise BatchError("async_max_concurrent_samples has no room for one group", got=most,
                         who=who(config, "rollout.async_max_concurrent_samples"),
                         fix=f"at least n_samples_per_prompt = {rollout.n_samples_per_prompt}")


def _scorers(config: RunConfig) -> None:
    rollout, weights = config.rollout, config.rollout.rm_weights
    if len(set(rollout.rm_type)) != len(rollout.rm_type):
        raise ConfigError("a scorer is named twice", got=", ".join(rollout.rm_type),
                          who=who(config, "rollout.rm_type"), fix="name it once; weights make it count more")
    if weights and not any(weights) and config.trains:
        raise ConfigError("all weights are 0, and so would be every reward", who=who(config, "rollout.rm_weights"),
                          fix="give the scorer that counts a weight above 0")


def _evaluation(config: RunConfig, note: Note) -> None:
    eval_ = config.eval
    pairs = eval_.eval_prompt_data
    joined = re.fullmatch(r"[\w.-]+[=:,](.+)", pairs[0]) if len(pairs) == 1 else None
    if len(pairs) > 1 and len(pairs) % 2 or joined and Path(joined[1]).is_file():
        raise ConfigError("eval_prompt_data should be NAME PATH pairs", got=" ".join(pairs),
                          who=who(config, "eval.eval_prompt_data"),
                          fix="--eval-prompt-data gsm8k data/gsm8k.jsonl math data/math.jsonl")
    names = [*(pairs[::2] if len(pairs) > 1 else ()), *(dataset.get("name") for dataset in eval_.datasets)]
    if wrong := next((name for name in names if Path(str(name)).is_file() or names.count(name) > 1), None):
        raise ConfigError("each eval dataset has a name of its own, and its metrics are called so", got=wrong,
                          who=who(config, "eval.eval_prompt_data"), fix="--eval-prompt-data NAME PATH NAME PATH")
    if eval_.eval_interval is not None and not (pairs or eval_.datasets):
        raise ConfigError("eval_interval is given but no eval dataset", who=who(config, "eval.eval_interval"),
                          fix="add --eval-prompt-data NAME PATH")
    if eval_.eval_interval is None and (pairs or eval_.datasets):
        note("nothing is evaluated: there is no --eval-interval")
    text, whole, number, table = "a text", "a whole number from 1 on", "a number", "a table"
    allowed = {"name": text, "path": text, "input_key": text, "label_key": text, "n_samples": whole, "top_k": whole,
               "max_response_len": whole, "temperature": number, "top_p": number, "rm_type": text,
               "metadata_overrides": table}
    for dataset in eval_.datasets:
        if unknown := sorted({*dataset} - {*allowed}):
            raise ConfigError(f"[[eval.datasets]] has no key {unknown[0]!r}", who=who(config, "eval.datasets"),
                              fix=f"keys are {', '.join(sorted(allowed))}")
        if "name" not in dataset or "path" not in dataset:
            raise ConfigError("[[eval.datasets]] needs name and path", got=dataset, who=who(config, "eval.datasets"),
                              fix="add them")
        for key, value in dataset.items():
            fits = {table: isinstance(value, dict), text: isinstance(value, str) and value != "",
                    number: type(value) in (int, float),
                    whole: type(value) is int and (value > 0 or (key, value) == ("top_k", -1))}
            if not fits[allowed[key]]:
                raise ConfigError(f"{key} of [[eval.datasets]] is {allowed[key]}", got=repr(value),
                                  who=who(config, "eval.datasets"), fix="correct it, or leave it out")


def _checkpoints(config: RunConfig, note: Note) -> None:
    checkpoint = config.checkpoint
    for key in ("save_interval", "save_hf"):
        if getattr(checkpoint, key) is not None and checkpoint.save is None:
            raise ConfigError(f"{key} needs --save", who=who(config, f"checkpoint.{key}"), fix="add --save FOLDER")
    if (every := checkpoint.save_interval) and config.rollout.num_rollout and every > config.rollout.num_rollout:
        note(f"save_interval {every} is beyond the run's {config.rollout.num_rollout} rollouts: the only checkpoint is "
             "the one at the end")
    _restarts(config, note)


def _restarts(config: RunConfig, note: Note) -> None:
    checkpoint, origin = config.checkpoint, who(config, "perf.max_restarts")
    if config.perf.max_restarts and checkpoint.save is None:
        raise ConfigError("--max-restarts goes on from checkpoints, and this run writes none", who=origin,
                          fix="add --save FOLDER and --save-interval N")
    if config.perf.max_restarts and checkpoint.no_save_optim:
        raise ConfigError("a restart from checkpoints without the optimizer would not be exact",
                          who=who(config, "perf.max_restarts", "checkpoint.no_save_optim"), fix="drop --no-save-optim")
    if config.perf.max_restarts and checkpoint.save_interval is None:
        note("without --save-interval the only checkpoint is the last: a restart begins from the start of the run")


def _places(config: RunConfig) -> None:
    """What stands in braces in a path."""
    checkpoint, debug = config.checkpoint, config.debug
    for key, value in (("checkpoint.save_hf", checkpoint.save_hf),
                       ("debug.save_debug_rollout_data", config.debug.save_debug_rollout_data),
                       ("debug.load_debug_rollout_data", config.debug.load_debug_rollout_data)):
        try:
            (value or "").format(rollout_id=0)
        except (KeyError, IndexError, ValueError):
            raise ConfigError("the only things in braces can be {rollout_id} and {run_dir}", got=value,
                              who=who(config, key), fix="write {rollout_id}, for instance hf/{rollout_id}") from None
    for key in ("save_debug_rollout_data", "load_debug_rollout_data"):
        value = getattr(debug, key)
        if value is not None and "{rollout_id}" not in value:
            raise ConfigError(f"--{key.replace('_', '-')} has no place for the rollout's number", got=value,
                              who=who(config, f"debug.{key}"), fix="write {rollout_id} into the path")
