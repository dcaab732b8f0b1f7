"""Check: relations between values, and the values that follow from others. Before torch is imported."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from miles_core.config.algorithm import clip_band, needs_reference
from miles_core.config.check_lengths import check_lengths
from miles_core.config.check_machine import check_machine
from miles_core.config.check_model import check_model
from miles_core.config.check_paths import astray, check_paths
from miles_core.config.check_rows import check_rows
from miles_core.config.check_silent import check_numbers, check_silent, trains
from miles_core.config.environment import check_environment
from miles_core.config.hardware import colocate, trainer_host, weight_sync
from miles_core.config.hf_files import check_files
from miles_core.config.load import who, with_values
from miles_core.config.tables import RunConfig
from miles_core.errors import BatchError, CheckpointError, ConfigError
from miles_core.plugins.bind import bind
from miles_core.plugins.select import Selected, built_in
from miles_core.reading import reading


def check(config: RunConfig, plugins: Sequence[Selected] | None = None) -> tuple[RunConfig, list[str]]:
    """The configuration with everything derived that can be, and what has to be announced.

    Args:
        plugins: whose hooks `derive` and `check` are asked; default: those of every run.

    Raises:
        BatchError: the batch knobs do not fit together, or a layout that cannot be trained.
        ConfigError, DataError, CheckpointError: anything else; says what, got, who and the fix.
    """
    notes: list[str] = []
    hooks = bind(built_in() if plugins is None else plugins, config, "plan")
    config = _in_run_dir(config)
    for step in (_debug, _required, clip_band, check_numbers, colocate, _batch, _rollout, _rewards, _evaluation,
                 hooks.derive, trainer_host, weight_sync, check_silent, hooks.check, _checkpoints, check_paths,
                 check_model, check_lengths, check_files, check_rows, check_environment, check_machine):
        with reading(f"--hf-checkpoint {config.checkpoint.hf_checkpoint}", CheckpointError):
            config = step(config, notes.append) if step is not None else config
    return config, notes


Note = Callable[[str], None]


def _in_run_dir(config: RunConfig) -> RunConfig:
    """Fill {run_dir} in the paths that may hold it, so that a run moves with one flag."""
    run_dir = config.checkpoint.run_dir or f"runs/{config.name}"
    changed: dict[str, object] = {"checkpoint__run_dir": run_dir}
    for table, key in (("checkpoint", "load"), ("checkpoint", "save"), ("checkpoint", "save_hf"),
                       ("checkpoint", "ref_load"), ("debug", "save_debug_rollout_data"),
                       ("debug", "load_debug_rollout_data")):
        path = getattr(getattr(config, table), key)
        if path is not None and "{run_dir}" in path:
            changed[f"{table}__{key}"] = path.replace("{run_dir}", run_dir)
    return with_values(config, "derived", **changed)


def _debug(config: RunConfig, note: Note) -> RunConfig:
    debug = config.debug
    if debug.load_debug_rollout_data:
        note("--load-debug-rollout-data replays saved rollouts: --debug-train-only is implied")
        config = with_values(config, "--load-debug-rollout-data", debug__debug_train_only=True)
    elif debug.debug_train_only:
        raise ConfigError("--debug-train-only has nothing to train on", who=who(config, "debug.debug_train_only"),
                          fix="name saved rollouts with --load-debug-rollout-data PATH/{rollout_id}")
    if config.debug.debug_train_only and debug.debug_rollout_only:
        raise ConfigError("--debug-rollout-only and --debug-train-only exclude each other",
                          who=who(config, "debug.debug_rollout_only", "debug.debug_train_only"), fix="drop one")
    folder = (debug.load_debug_rollout_data or "").partition("{")[0].rpartition("/")[0]
    pattern = re.sub(r"\{[^}]*\}", "*", (debug.load_debug_rollout_data or "").removeprefix(f"{folder}/"))
    if folder and (astray(folder) or any(Path(folder).glob("*")) and not any(Path(folder).glob(pattern))):
        raise ConfigError("there are no rollouts to replay", got=f"no {pattern} in {folder}",
                          who=who(config, "debug.load_debug_rollout_data"), fix="check the path")
    for key in ("save_debug_rollout_data", "load_debug_rollout_data"):
        value = getattr(debug, key)
        if value is not None and "{rollout_id}" not in value:
            raise ConfigError(f"--{key.replace('_', '-')} has no place for the rollout's number", got=value,
                              who=who(config, f"debug.{key}"), fix="write {rollout_id} into the path")
    return config


def _required(config: RunConfig, note: Note) -> RunConfig:
    needed = {"checkpoint.hf_checkpoint": config.checkpoint.hf_checkpoint,
              "rollout.prompt_data": config.rollout.prompt_data or config.debug.load_debug_rollout_data
              or (None if config.rollout.prompt_source == "jsonl" else config.rollout.prompt_source),
              "rollout.rollout_batch_size": config.rollout.rollout_batch_size,
              "rollout.num_rollout": config.rollout.num_rollout if config.rollout.num_rollout is not None
              else config.rollout.num_epoch}
    for key, value in needed.items():
        if value is None:
            table, _, name = key.partition(".")
            raise ConfigError(f"{key} is needed", who="run file and flags",
                              fix=f"write {name} = ... in [{table}], or --{name.replace('_', '-')} VALUE")
    return config


def _batch(config: RunConfig, note: Note) -> RunConfig:
    """rollout_batch_size x n_samples_per_prompt = global_batch_size x num_steps_per_rollout."""
    rollout = config.rollout
    positive = ("rollout_batch_size", "n_samples_per_prompt", "global_batch_size", "num_steps_per_rollout", "num_epoch")
    for key in positive:
        value = getattr(rollout, key)
        if value is not None and value < 1:
            raise BatchError(f"rollout.{key} should be at least 1", got=value, who=who(config, f"rollout.{key}"),
                             fix="raise it")
    if rollout.num_rollout is not None and rollout.num_rollout < 0:
        raise BatchError("rollout.num_rollout should not be negative", got=rollout.num_rollout, fix="0 evaluates only")
    total = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    steps, batch = rollout.num_steps_per_rollout, rollout.global_batch_size
    if steps is None and batch is None:
        steps = 1
    if steps is None:
        steps, rest, divisor = total // batch, total % batch, f"global_batch_size {batch}"
    else:
        rest, divisor = total % steps, f"num_steps_per_rollout {steps}"
    if rest or steps == 0:
        raise BatchError(
            f"a rollout's {rollout.rollout_batch_size} x {rollout.n_samples_per_prompt} = {total} samples do not "
            f"divide by {divisor}",
            who=who(config, "rollout.rollout_batch_size", "rollout.n_samples_per_prompt", "rollout.global_batch_size",
                     "rollout.num_steps_per_rollout"),
            fix="rollout_batch_size x n_samples_per_prompt = global_batch_size x num_steps_per_rollout",
        )
    if batch is not None and batch * steps != total:
        raise BatchError(
            f"rollout_batch_size x n_samples_per_prompt is {total}, "
            f"global_batch_size x num_steps_per_rollout is {batch * steps}",
            who=who(config, "rollout.global_batch_size", "rollout.num_steps_per_rollout"),
            fix="drop one of the last two: it follows from the other three",
        )
    _schedule(config, (rollout.num_rollout or 0) * steps)
    return with_values(config, "batch arithmetic", rollout__global_batch_size=total // steps,
                       rollout__num_steps_per_rollout=steps)


def _schedule(config: RunConfig, steps: int) -> None:
    warmup, style = config.optimizer.lr_warmup_iters, config.optimizer.lr_decay_style
    last = steps if style == "constant" else config.optimizer.lr_decay_iters or steps
    if not steps or config.debug.debug_rollout_only:
        return
    if warmup and warmup >= last:
        raise ConfigError("the run, or its decay, ends before the warm-up does", got=f"{warmup} of {last} steps",
                          who=who(config, "optimizer.lr_warmup_iters", "rollout.num_rollout"),
                          fix="lower --lr-warmup-iters, which counts optimizer steps")
    if 2 * last < steps and not config.optimizer.min_lr:
        raise ConfigError("the learning rate is 0 in most of the run, once it has decayed", got=f"{last} of {steps} "
                          "steps", who=who(config, "optimizer.lr_decay_iters", "rollout.num_rollout"),
                          fix="leave --lr-decay-iters out, which counts optimizer steps, or add --min-lr")


def _rollout(config: RunConfig, note: Note) -> RunConfig:
    rollout = config.rollout
    over = rollout.over_sampling_batch_size or rollout.rollout_batch_size
    if over < rollout.rollout_batch_size:
        raise BatchError("rollout.over_sampling_batch_size is below rollout_batch_size", got=over,
                         who=who(config, "rollout.over_sampling_batch_size"),
                         fix=f"at least {rollout.rollout_batch_size}")
    if rollout.max_lag and config.perf.colocate:
        raise ConfigError("--colocate hands the GPUs back and forth and needs max_lag = 0",
                          got=f"max_lag = {rollout.max_lag}", who=who(config, "perf.colocate", "rollout.max_lag"),
                          fix="set max_lag = 0")
    _staleness(config, note)
    if rollout.rollout_top_p < 1 or rollout.rollout_top_k > 0:
        note("top-p and top-k restrict what is drawn; log-probs stay those of the uncut distribution on both sides")
    return with_values(config, "rollout_batch_size", rollout__over_sampling_batch_size=over)


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


def _rewards(config: RunConfig, note: Note) -> RunConfig:
    rollout = config.rollout
    weights = rollout.rm_weights or [1.0] * len(rollout.rm_type)
    if len(weights) != len(rollout.rm_type):
        raise ConfigError(f"{len(rollout.rm_type)} scorers and {len(weights)} weights",
                          who=who(config, "rollout.rm_type", "rollout.rm_weights"),
                          fix="one weight for each scorer, in the same order")
    if len(set(rollout.rm_type)) != len(rollout.rm_type):
        raise ConfigError("a scorer is named twice", got=", ".join(rollout.rm_type),
                          who=who(config, "rollout.rm_type"), fix="name it once; weights make it count more")
    if weights and not any(weights) and trains(config):
        raise ConfigError("all weights are 0, and so would be every reward", who=who(config, "rollout.rm_weights"),
                          fix="give the scorer that counts a weight above 0")
    return with_values(config, "rm_type", rollout__rm_weights=weights)


def _evaluation(config: RunConfig, note: Note) -> RunConfig:
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
    text, whole, number = "a text", "a whole number from 1 on", "a number"
    allowed = {"name": text, "path": text, "input_key": text, "label_key": text, "n_samples": whole, "top_k": whole,
               "max_response_len": whole, "temperature": number, "top_p": number, "rm_type": text}
    for dataset in eval_.datasets:
        if unknown := sorted({*dataset} - {*allowed}):
            raise ConfigError(f"[[eval.datasets]] has no key {unknown[0]!r}", who=who(config, "eval.datasets"),
                              fix=f"keys are {', '.join(sorted(allowed))}")
        if "name" not in dataset or "path" not in dataset:
            raise ConfigError("[[eval.datasets]] needs name and path", got=dataset, who=who(config, "eval.datasets"),
                              fix="add them")
        for key, value in dataset.items():
            fits = {text: isinstance(value, str) and value != "", number: type(value) in (int, float),
                    whole: type(value) is int and (value > 0 or (key, value) == ("top_k", -1))}
            if not fits[allowed[key]]:
                raise ConfigError(f"{key} of [[eval.datasets]] is {allowed[key]}", got=repr(value),
                                  who=who(config, "eval.datasets"), fix="correct it, or leave it out")
    return config


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


def _checkpoints(config: RunConfig, note: Note) -> RunConfig:
    checkpoint = config.checkpoint
    for key in ("save_interval", "save_hf"):
        if getattr(checkpoint, key) is not None and checkpoint.save is None:
            raise ConfigError(f"{key} needs --save", who=who(config, f"checkpoint.{key}"), fix="add --save FOLDER")
    if (every := checkpoint.save_interval) and config.rollout.num_rollout and every > config.rollout.num_rollout:
        note(f"save_interval {every} is beyond the run's {config.rollout.num_rollout} rollouts: the only checkpoint is "
             "the one at the end")
    _restarts(config, note)
    for key, value in (("checkpoint.save_hf", checkpoint.save_hf),
                       ("debug.save_debug_rollout_data", config.debug.save_debug_rollout_data),
                       ("debug.load_debug_rollout_data", config.debug.load_debug_rollout_data)):
        try:
            (value or "").format(rollout_id=0)
        except (KeyError, IndexError, ValueError):
            raise ConfigError("the only things in braces can be {rollout_id} and {run_dir}", got=value,
                              who=who(config, key), fix="write {rollout_id}, for instance hf/{rollout_id}") from None
    changed: dict[str, object] = {}
    if needs_reference(config) and checkpoint.ref_load is None:
        note(f"the reference model is --hf-checkpoint {checkpoint.hf_checkpoint}, as --ref-load is not given")
        changed["checkpoint__ref_load"] = checkpoint.hf_checkpoint
    return with_values(config, "derived", **changed)
