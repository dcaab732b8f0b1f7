"""Settings and hooks that the trainer fsdp would leave without effect: for the plan, and for whoever makes one."""

from __future__ import annotations

from miles_local.muon_options import MUON

from miles_core import hookspecs
from miles_core.config.hardware import trainer_gpus
from miles_core.config.load import who
from miles_core.config.tables import RunConfig
from miles_core.errors import BatchError, ConfigError
from miles_core.plugins.bind import Hooks
from miles_core.plugins.load import marked
from miles_core.plugins.select import all_specs
from miles_fsdp.plugin import FsdpOptions

MODULES = "hf-modules"
"""What a plugin provides whose `build_model` takes modules of transformers."""


def refuse(config: RunConfig, options: FsdpOptions) -> None:
    """
    Raises:
        ConfigError: an option without effect here, or ranks that nothing hosts.
        BatchError: a batch that the ranks cannot share.
    """
    if config.debug.debug_rollout_only:
        return
    _options(config)
    _ranks(config, options)
    _batch(config, options.context_parallel_size * options.tensor_parallel_size)


def refuse_hooks(hooks: Hooks) -> None:
    """
    Raises:
        ConfigError: a plugin would change Megatron's model, and does not say that it can change transformers'.
    """
    foreign = {name for name, spec in all_specs().items()
               if spec.__module__ != hookspecs.__name__ and spec.role == "trainer" and spec.kind == "chain"}
    for plugin, instance in hooks.instances.items():
        theirs = sorted(foreign & {hook for hook, *_ in marked(type(instance)).values()})
        if theirs and MODULES not in getattr(instance, "provides", ()):
            raise ConfigError(f"plugin {plugin!r} changes models of Megatron's trainer alone", got=", ".join(theirs),
                              who="--trainer fsdp", code="fsdp-hook-not-called", fix="leave the plugin out, or train "
                              f"with --trainer megatron; a build_model that takes modules provides {MODULES!r}")


def _options(config: RunConfig) -> None:
    # What a plugin brings is meant for Megatron's trainer alone; plugins that work there alone are in conflict by name.
    if set_ := sorted(name for name in config.surface("megatron")
                      if getattr(config.origin.get(f"megatron.{name}"), "kind", None) != "plugin"):
        raise ConfigError("the trainer fsdp has no options of Megatron-core", code="fsdp-megatron-options",
                          got=", ".join(set_), who=who(config, *(f"megatron.{name}" for name in set_)),
                          fix="leave them out, or train with --trainer megatron")
    settings = {
        "perf.balance_by_flops": config.perf.balance_by_flops,
        "perf.mfu_peak_tflops": config.perf.mfu_peak_tflops,
        "algorithm.fp32_lm_head": config.algorithm.fp32_lm_head and config.perf.bf16,
        "debug.use_pytorch_profiler": config.debug.use_pytorch_profiler,
        "model.model_name": getattr(config.origin.get("model.model_name"), "kind", "derived") != "derived",
    }  # fmt: skip
    if keys := [key for key, is_set in settings.items() if is_set]:
        raise ConfigError("the trainer fsdp does without", got=", ".join(keys), who=who(config, *keys),
                          code="fsdp-option-without-effect", fix="leave it out, or train with --trainer megatron")


def _ranks(config: RunConfig, options: FsdpOptions) -> None:
    perf = config.perf
    if perf.trainer_host == "thread" and trainer_gpus(config) > 1:
        raise ConfigError('trainer_host = "thread" is the driver\'s process, which holds one rank',
                          code="fsdp-thread-many-ranks", got=f"{trainer_gpus(config)} ranks",
                          who=who(config, "perf.trainer_host", "perf.actor_num_gpus_per_node"),
                          fix='trainer_host = "process", or one rank')
    if perf.placement == "local" and perf.actor_num_nodes > 1:
        raise ConfigError("spawned processes are all on the driver's machine; ranks on several nodes are Ray actors",
                          got=f"actor_num_nodes = {perf.actor_num_nodes}", code="fsdp-many-nodes",
                          who=who(config, "perf.actor_num_nodes", "perf.placement"), fix='placement = "ray"')
    context, tensor = options.context_parallel_size, options.tensor_parallel_size
    if min(context, tensor) < 1 or trainer_gpus(config) % (context * tensor) or min(context, tensor) > 1:
        raise ConfigError("the ranks do not divide into groups that share rows, or layers", code="fsdp-context-size",
                          got=f"{trainer_gpus(config)} ranks, {context} that share rows, {tensor} layers",
                          who=who(config, "fsdp.context_parallel_size", "fsdp.tensor_parallel_size",
                                  "perf.actor_num_gpus_per_node"),
                          fix="one size that divides the number of ranks")
    if tensor > 1 and config.optimizer.optimizer in MUON:
        raise ConfigError("Muon moves whole matrices, of which tensor parallelism leaves parts", who="--optimizer",
                          got=config.optimizer.optimizer, code="fsdp-tensor-muon", fix="leave out one of the two")


def _batch(config: RunConfig, together: int) -> None:
    perf, batch = config.perf, config.rollout.global_batch_size or 0
    if perf.use_dynamic_batch_size and perf.max_tokens_per_gpu is None:
        raise BatchError("use_dynamic_batch_size needs max_tokens_per_gpu", code="fsdp-max-tokens-missing",
                         who=who(config, "perf.use_dynamic_batch_size"), fix="--max-tokens-per-gpu 8192")
    unit = trainer_gpus(config) // together * (1 if perf.use_dynamic_batch_size else perf.micro_batch_size)
    if batch % unit:
        raise BatchError(f"global_batch_size {batch} does not divide among the ranks' micro-batches",
                         got=f"{batch} / {unit}", code="fsdp-batch-not-divisible",
                         who=who(config, "rollout.global_batch_size", "perf.actor_num_gpus_per_node"),
                         fix=f"use a multiple of {unit}")
