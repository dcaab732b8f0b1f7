"""Check: relations between values, and the values that follow from others. Before torch is imported."""

from __future__ import annotations

from collections.abc import Sequence

from miles_core.config.hardware import Note, colocate, trainer_host, weight_sync
from miles_core.config.load import who, with_values
from miles_core.config.tables import RunConfig
from miles_core.errors import BatchError, CheckpointError, ConfigError
from miles_core.plugins.bind import bind
from miles_core.plugins.resolve import resolve
from miles_core.plugins.select import Selected, built_in
from miles_core.reading import reading


def check(config: RunConfig, plugins: Sequence[Selected] | None = None) -> tuple[RunConfig, list[str]]:
    """The configuration with everything derived that can be, and what has to be announced.

    Args:
        plugins: whose hooks `derive` and `check` are asked, and who offer all parts; default: those of every run.

    Raises:
        BatchError: the batch knobs do not fit together, or a layout that cannot be trained.
        ConfigError, DataError, CheckpointError: anything else; says what, got, who and the fix.
    """
    notes: list[str] = []
    selected = built_in() if plugins is None else plugins
    hooks = bind(selected, config, "plan")
    config = _in_run_dir(config)
    with reading(f"--hf-checkpoint {config.checkpoint.hf_checkpoint}", CheckpointError):
        for step in (_debug, _required, _clip_band, colocate, _batch, _rollout, _rewards, hooks.derive,
                     trainer_host, weight_sync, _read):
            config = step(config, notes.append) if step is not None else config
        if plugins is not None:
            resolve(plugins, config)  # a part that nobody offers is told before what is wrong with files
        return config if hooks.check is None else hooks.check(config, notes.append, selected), notes


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


def _clip_band(config: RunConfig, note: Note) -> RunConfig:
    """A width that is given alone is that of both sides of the clip band, as in radixark Miles."""
    if "algorithm.eps_clip" not in config.origin or "algorithm.eps_clip_high" in config.origin:
        return config
    return with_values(config, "as eps_clip", algorithm__eps_clip_high=config.algorithm.eps_clip)


def _debug(config: RunConfig, note: Note) -> RunConfig:
    debug, generator = config.debug, config.rollout.generate
    evaluates = config.eval.every and config.eval.eval_interval
    if debug.load_debug_rollout_data:
        note("--load-debug-rollout-data replays saved rollouts: --debug-train-only is implied")
        config = with_values(config, "--load-debug-rollout-data", debug__debug_train_only=True)
    elif "no-engine" in config.stated.get(f"generate:{generator}", ()) and not (evaluates or debug.debug_rollout_only):
        config = with_values(config, f"--generate {generator}", debug__debug_train_only=True)
    if config.debug.debug_train_only and evaluates:
        note("nothing is evaluated: the run has no engine")
    if config.debug.debug_train_only and debug.debug_rollout_only:
        raise ConfigError("--debug-rollout-only and --debug-train-only are mutually exclusive",
                          code="debug-modes-exclusive",
                          who=who(config, "debug.debug_rollout_only", "debug.debug_train_only"), fix="remove one")
    return config


def _required(config: RunConfig, note: Note) -> RunConfig:
    needed = {"checkpoint.hf_checkpoint": config.checkpoint.hf_checkpoint,
              "rollout.prompt_data": config.rollout.prompt_data or config.debug.load_debug_rollout_data
              or (None if config.rollout.prompt_source == "rows" else config.rollout.prompt_source),
              "rollout.rollout_batch_size": config.rollout.rollout_batch_size,
              "rollout.num_rollout": config.rollout.num_rollout if config.rollout.num_rollout is not None
              else config.rollout.num_epoch}
    for key, value in needed.items():
        if value is None:
            table, _, name = key.partition(".")
            raise ConfigError(f"{key} is required", code="setting-required", who="run file and flags",
                              fix=f"set {name} = ... in [{table}], or pass --{name.replace('_', '-')} VALUE")
    if config.rollout.num_rollout is not None and config.rollout.num_epoch is not None:
        note("num_epoch is ignored, as num_rollout is set")
    return config


def _batch(config: RunConfig, note: Note) -> RunConfig:
    """rollout_batch_size x n_samples_per_prompt = global_batch_size x num_steps_per_rollout."""
    rollout = config.rollout
    sampled, trained = ("rollout_batch_size", "n_samples_per_prompt"), ("global_batch_size", "num_steps_per_rollout")
    total = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    steps, batch = rollout.num_steps_per_rollout, rollout.global_batch_size
    if steps is None and batch is None:
        steps = 1
    if steps is None:
        steps, remainder, divisor = total // batch, total % batch, f"global_batch_size {batch}"
    else:
        remainder, divisor = total % steps, f"num_steps_per_rollout {steps}"
    if remainder or steps == 0:
        raise BatchError(f"{rollout.rollout_batch_size} x {rollout.n_samples_per_prompt} = {total} samples per rollout "
                         f"do not divide by {divisor}", code="rollout-not-divisible",
                         who=who(config, *(f"rollout.{key}" for key in (*sampled, *trained))),
                         fix=f"{' x '.join(sampled)} must equal {' x '.join(trained)}")
    if batch is not None and batch * steps != total:
        raise BatchError(f"{' x '.join(sampled)} is {total}, but {' x '.join(trained)} is {batch * steps}",
                         code="rollout-and-train-sizes-differ", who=who(config, *(f"rollout.{key}" for key in trained)),
                         fix="remove one of the last two; it follows from the other three")
    return with_values(config, "batch arithmetic", rollout__global_batch_size=total // steps,
                       rollout__num_steps_per_rollout=steps)


def _rollout(config: RunConfig, note: Note) -> RunConfig:
    rollout = config.rollout
    over = rollout.over_sampling_batch_size or rollout.rollout_batch_size
    if over < rollout.rollout_batch_size:
        raise BatchError("over_sampling_batch_size is below rollout_batch_size", code="over-sampling-too-small",
                         got=over, who=who(config, "rollout.over_sampling_batch_size"),
                         fix=f"use at least {rollout.rollout_batch_size}")
    if rollout.max_lag and config.perf.colocate:
        raise ConfigError("--colocate requires max_lag = 0", code="colocate-needs-lag-zero",
                          got=f"max_lag = {rollout.max_lag}", who=who(config, "perf.colocate", "rollout.max_lag"),
                          fix="set max_lag = 0")
    if rollout.rollout_top_p < 1 or rollout.rollout_top_k > 0:
        note("top-p and top-k restrict what is drawn; log-probs stay those of the uncut distribution on both sides")
    return with_values(config, "rollout_batch_size", rollout__over_sampling_batch_size=over)


def _rewards(config: RunConfig, note: Note) -> RunConfig:
    rollout = config.rollout
    weights = rollout.rm_weights or [1.0] * len(rollout.rm_type)
    if len(weights) != len(rollout.rm_type):
        raise ConfigError(f"{len(rollout.rm_type)} scorers, but {len(weights)} weights", code="reward-weights-count",
                          who=who(config, "rollout.rm_type", "rollout.rm_weights"),
                          fix="give one weight per scorer, in the same order")
    return with_values(config, "rm_type", rollout__rm_weights=weights)


def _read(config: RunConfig, note: Note) -> RunConfig:
    """Saved rollouts and the reference, once plugins have decided what generates."""
    checkpoint, debug = config.checkpoint, config.debug
    if debug.debug_train_only and not debug.load_debug_rollout_data and config.rollout.generate == "single-turn":
        raise ConfigError("--debug-train-only needs saved rollouts", who=who(config, "debug.debug_train_only"),
                          code="train-only-without-data", fix="add --load-debug-rollout-data PATH/{rollout_id}")
    if not config.algorithm.needs_reference or checkpoint.ref_load is not None:
        return config
    note(f"the reference model is --hf-checkpoint {checkpoint.hf_checkpoint}, as --ref-load is not given")
    return with_values(config, "derived", checkpoint__ref_load=checkpoint.hf_checkpoint)
