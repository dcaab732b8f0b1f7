"""The engine that evaluates: what it is, where it runs, and what of the run's settings is not its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.config import RunConfig
from miles_core.config.hardware import gpus
from miles_core.config.load import who, with_values
from miles_core.errors import ConfigError
from miles_core.plugins.resolve import chosen
from miles_core.stages.placement import Local, demand

if TYPE_CHECKING:
    from miles_core.stages.placement import Placement
    from miles_core.stages.rollout import Engine
    from miles_dedicated_eval.plugin import DedicatedEvalOptions

TABLE = "dedicated-eval"
FOLDER = "dedicated-eval"
"""Of the run directory: what these servers write, beside what the run's own of the same numbers do."""


def serves(config: RunConfig, options: DedicatedEvalOptions) -> bool:
    """Whether there is an engine for evaluations."""
    wanted, debug = options.eval_num_gpus != 0 or options.eval_engine_addrs, config.debug
    both = not (debug.debug_rollout_only or debug.debug_train_only)  # else no weights travel
    return bool(wanted and both and config.eval.every and config.eval.eval_interval)


def hosted(config: RunConfig, options: DedicatedEvalOptions) -> int:
    """GPUs that the placement has to give."""
    if options.eval_engine_addrs or not {"servers", "server_args"} & set(config.understood):
        return 0
    each = config.perf.rollout_num_gpus_per_engine
    return each if options.eval_num_gpus is None else options.eval_num_gpus


def derive(config: RunConfig, options: DedicatedEvalOptions, note: Callable[[str], None]) -> RunConfig:
    """
    Raises:
        ConfigError: the hardware is not there, or is somebody else's.
    """
    perf, each = config.perf, config.perf.rollout_num_gpus_per_engine
    if not serves(config, options):
        note("dedicated-eval has nothing to do: the run evaluates nothing, or by its only engine")
        return config
    if perf.colocate:
        raise ConfigError("an engine of its own for evaluations needs hardware that training does not take turns at",
                          code="dedicated-eval-colocated", who=who(config, "perf.colocate"),
                          fix="drop --colocate, or --eval-num-gpus: the run's own engine evaluates then")
    wanted, size = hosted(config, options), options.eval_num_gpus_per_engine or each
    origin = who(config, f"{TABLE}.eval_num_gpus", f"{TABLE}.eval_num_gpus_per_engine")
    if size != each or wanted % each:
        raise ConfigError("servers that evaluate are as large as those of training", who=origin,
                          got=f"{wanted} GPUs, {size} each; in training {each} each",
                          fix=f"a multiple of {each}, and leave --eval-num-gpus-per-engine out",
                          code="dedicated-eval-server-size")
    if wanted and (perf.placement != "local" or "external" in config.understood):
        raise ConfigError("servers for evaluations are started on this machine, and beside servers of this run alone",
                          code="dedicated-eval-placement", got=f"placement {perf.placement}", who=who(
                              config, "perf.placement", "sglang.rollout_external"),
                          fix="start them yourself and name them with --eval-engine-addrs HOST:PORT")
    if wanted and 0 < gpus() < demand(config) + wanted:
        raise ConfigError("there are too few GPUs for training and evaluations", code="dedicated-eval-gpus",
                          got=f"{gpus()} here, {demand(config)} for training, {wanted} for evaluations", who=origin,
                          fix="lower --rollout-num-gpus, or leave --eval-num-gpus out")
    if options.eval_engine_addrs and "server_args" not in config.understood:
        raise ConfigError("servers that already run are SGLang's", code="dedicated-eval-addresses-other-engine",
                          got=f"engine {chosen(config, 'engine')}", who=who(config, f"{TABLE}.eval_engine_addrs"),
                          fix="write --engine sglang")
    return config


def lines(config: RunConfig, options: DedicatedEvalOptions) -> list[tuple[str, str]]:
    """For the plan: what evaluates, and the rule where that is slower than training."""
    if not serves(config, options):
        return []
    count = hosted(config, options)
    where = f" on {count} GPU{'s'[:count != 1]}" if count else ""
    where = f" at {', '.join(options.eval_engine_addrs)}" if options.eval_engine_addrs else where
    rule = "the next one waits for it" if options.eval_overflow_policy == "backpressure" else "the next one is skipped"
    return [("evaluation", f"by an engine of its own{where}, beside training; {rule}")]


def engine_of(parts: Any, options: DedicatedEvalOptions) -> tuple[Engine, Placement | None]:
    """The run's kind of engine once more, and the hosts of its servers, not opened yet; None where it needs none."""
    config: RunConfig = parts.config
    count, name = hosted(config, options), chosen(config, "engine")
    # The GPUs of all of training are a trainer's to this placement, which takes those after them.
    placement = Local(with_values(config, TABLE, perf__rollout_num_gpus=count, perf__actor_num_nodes=1,
                                  perf__actor_num_gpus_per_node=demand(config))) if count else None
    own: dict[str, Any] = {"checkpoint__run_dir": str(Path(str(config.checkpoint.run_dir), FOLDER))}
    if count:
        own["perf__rollout_num_gpus"] = count
    if "server_args" in config.understood:  # neither servers nor router are shared with training: versions would mix
        own |= {"sglang__rollout_external": bool(options.eval_engine_addrs), "sglang__router": None,
                "sglang__rollout_external_engine_addrs": options.eval_engine_addrs,
                "sglang__router_ip": None, "sglang__router_port": None}
    config = with_values(config, TABLE, **own)
    Path(own["checkpoint__run_dir"], "logs").mkdir(parents=True, exist_ok=True)
    return parts.rollout.engine[name](config, parts.tokenizer, placement, parts.rollout), placement
