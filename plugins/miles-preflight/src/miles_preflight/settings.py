"""Settings that do not go together, though each alone would do: lag, scorers, evaluations, checkpoints, replays."""

from __future__ import annotations

import re
from pathlib import Path

from miles_core.config.load import who
from miles_core.config.tables import RunConfig
from miles_core.errors import BatchError, ConfigError
from miles_preflight.paths import Note

_TEXT, _WHOLE, _NUMBER, _TABLE = "a text", "a whole number from 1 on", "a number from 0 on", "a table"
OF_DATASETS = {"name": _TEXT, "path": _TEXT, "input_key": _TEXT, "label_key": _TEXT, "rm_type": _TEXT,
               "n_samples": _WHOLE, "top_k": _WHOLE, "max_response_len": _WHOLE, "temperature": _NUMBER,
               "top_p": _NUMBER, "metadata_overrides": _TABLE}
"""Keys of [[eval.datasets]], which only the first evaluation reads, and what they hold."""


def check_settings(config: RunConfig, note: Note) -> None:
    """
    Raises:
        ConfigError, BatchError: names the settings and who made them.
    """
    _staleness(config, note)
    _scorers(config)
    _evaluation(config, note)
    _saved(config)


def _staleness(config: RunConfig, note: Note) -> None:
    rollout = config.rollout
    limit, most = rollout.max_weight_staleness, rollout.async_max_concurrent_samples
    if limit is not None and limit < rollout.max_lag:
        note(f"max_weight_staleness {limit} is below max_lag {rollout.max_lag}: sampling runs {limit} rollout(s) ahead")
    if rollout.max_lag and not config.algorithm.use_rollout_logprobs:
        note(f"samples are up to {rollout.max_lag} versions old when they are trained on, and ratios are those to the "
             "weights before the step: --use-rollout-logprobs makes them those to the weights that were sampled from, "
             "--use-tis weights the difference")
    if most is not None and most < rollout.n_samples_per_prompt:
        raise BatchError("async_max_concurrent_samples has no room for one group", got=most,
                         who=who(config, "rollout.async_max_concurrent_samples"),
                         fix=f"at least n_samples_per_prompt = {rollout.n_samples_per_prompt}",
                         code="concurrency-below-group")


def _scorers(config: RunConfig) -> None:
    rollout = config.rollout
    if len(set(rollout.rm_type)) != len(rollout.rm_type):
        raise ConfigError("a scorer is named twice, and only the last of its weights would count",
                          got=", ".join(rollout.rm_type), who=who(config, "rollout.rm_type"),
                          fix="name it once; weights make it count more", code="scorer-named-twice")
    if rollout.rm_weights and not any(rollout.rm_weights) and config.trains:
        raise ConfigError("all weights are 0, and so would be every reward", who=who(config, "rollout.rm_weights"),
                          fix="give the scorer that counts a weight above 0", code="scorer-weights-zero")


def _evaluation(config: RunConfig, note: Note) -> None:
    eval_, origin = config.eval, who(config, "eval.eval_prompt_data")
    words, pairs = eval_.eval_prompt_data, "--eval-prompt-data gsm8k data/gsm8k.jsonl math data/math.jsonl"
    joined = re.fullmatch(r"[\w.-]+[=:,](.+)", words[0]) if len(words) == 1 else None
    if len(words) > 1 and len(words) % 2 or joined and Path(joined[1]).is_file():
        raise ConfigError("eval_prompt_data should be NAME PATH pairs", got=" ".join(words), who=origin, fix=pairs,
                          code="eval-data-not-pairs")
    if eval_.eval_interval is None and (words or eval_.datasets):
        note("nothing is evaluated: there is no --eval-interval")
    for dataset in eval_.datasets:
        wrong = next((key for key in OF_DATASETS if key in dataset and not _fits(key, dataset[key])), None)
        unknown = next((key for key in dataset if key not in OF_DATASETS), None)
        what = (f"[[eval.datasets]] has no key {unknown!r}" if unknown else
                f"{wrong} of [[eval.datasets]] is {OF_DATASETS[wrong]}" if wrong else
                "[[eval.datasets]] needs name and path" if not {"name", "path"} <= dataset.keys() else None)
        if what:
            raise ConfigError(what, got=repr(dataset), who=who(config, "eval.datasets"),
                              fix=f"keys are {', '.join(sorted(OF_DATASETS))}", code="eval-setting-impossible")
    names = [str(dataset["name"]) for dataset in eval_.every]
    if wrong := next((name for name in names if Path(name).is_file() or names.count(name) > 1), None):
        raise ConfigError("each eval dataset has a name of its own, and its metrics are called so", got=wrong,
                          who=origin, fix=pairs, code="eval-names-equal")


def _fits(key: str, value: object) -> bool:
    whole = type(value) is int and (value > 0 or (key, value) == ("top_k", -1))
    number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
    return {_TABLE: isinstance(value, dict), _TEXT: value != "" and isinstance(value, str), _NUMBER: number,
            _WHOLE: whole}[OF_DATASETS[key]]


def _saved(config: RunConfig) -> None:
    """Checkpoints that a restart could go on from, and names of files that are told apart."""
    checkpoint, debug = config.checkpoint, config.debug
    if config.perf.max_restarts and checkpoint.no_save_optim:
        raise ConfigError("a restart needs the optimizer, which no checkpoint would hold",
                          who=who(config, "perf.max_restarts", "checkpoint.no_save_optim"), fix="drop --no-save-optim",
                          code="restart-without-optimizer")
    for key, path in (("checkpoint.save_hf", checkpoint.save_hf),
                      ("debug.save_debug_rollout_data", debug.save_debug_rollout_data),
                      ("debug.load_debug_rollout_data", debug.load_debug_rollout_data)):
        try:
            told_apart = (path or "").format(rollout_id=0) != path or key == "checkpoint.save_hf" or path is None
        except (KeyError, IndexError, ValueError):
            told_apart = False
        if not told_apart:
            raise ConfigError("a path of rollouts should hold {rollout_id}, and nothing else in braces but {run_dir}",
                              got=path, fix="write {rollout_id}, as in hf/{rollout_id}", code="rollout-path-fields",
                              who=who(config, *["checkpoint.run_dir"] * ("{" in str(checkpoint.run_dir)), key))
