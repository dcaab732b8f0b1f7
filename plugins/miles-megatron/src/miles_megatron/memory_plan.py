"""The memory plan: what trainer and engine take of one GPU, what it has, and whether that fits. No torch here.

The trainer's share is miles_megatron/estimate.py's. Memory outside torch's allocator (the CUDA context, NCCL's
buffers) is OUTSIDE.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from miles_local.muon_options import LAYER_WISE, MUON

from miles_core.config.hardware import gpus, trainer_gpus
from miles_core.config.load import quantised, who
from miles_core.config.tables import RunConfig
from miles_core.errors import ConfigError
from miles_megatron import engine_weights, estimate
from miles_megatron.estimate import FP32, ModelDimensions, dimensions_of, tokens_of, trainer
from miles_megatron.layout import layout_of

GIB = 2**30
OUTSIDE = 1.5 * GIB
TOLERANCE = 0.1
"""How far the estimate may be off; only a run that is beyond it is refused."""


def engine(config: RunConfig, model: ModelDimensions) -> tuple[float, float | None]:
    """Bytes of an engine's weights on one GPU, and the share of it that they and the KV cache fill, if that is set."""
    share = engine_weights.weights(config, model) / config.perf.rollout_num_gpus_per_engine
    return share, config.surface("server").get("mem_fraction_static")


def check_memory(config: RunConfig, note: Callable[[str], None]) -> RunConfig:
    """The configuration as it is.

    Raises:
        ConfigError: trainer or engine cannot fit the GPUs, however generously the estimate is read.
    """
    model, capacity = dimensions_of(config), capacity_of(config)
    if model is None or capacity is None:
        return config
    _weights(config, model, capacity)
    if config.debug.debug_rollout_only:
        return config
    needed = peak(config, model)
    if needed * (1 - TOLERANCE) > capacity - OUTSIDE:
        fixes = list(_remedies(config, capacity))
        raise ConfigError(
            "the trainer does not fit the GPU's memory",
            got=f"about {needed / GIB:.0f} of {(capacity - OUTSIDE) / GIB:.0f} GiB ({_sum(trainer(config, model))})"
                + _engine_beside(config, model),
            who=who(config, "perf.max_tokens_per_gpu", "perf.actor_num_gpus_per_node"),
            fix=(", or ".join(fixes) or "more GPUs, with a larger --tensor-model-parallel-size")
                + "; or a layout of `miles layouts`, which takes the same words",
            code="trainer-exceeds-gpu-memory",
        )
    _share(config, model, needed, capacity)
    if needed > (capacity - OUTSIDE) * (1 - TOLERANCE):
        note(f"the trainer's memory is tight: about {needed / GIB:.0f} of {(capacity - OUTSIDE) / GIB:.0f} GiB")
    return config


def _weights(config: RunConfig, model: ModelDimensions, capacity: float) -> None:
    """
    Raises:
        ConfigError: an engine's weights leave no room for its KV cache.
    """
    stated = engine_weights.quantization(config)
    unknown = quantised(config) and (stated is None or engine_weights.bytes_of(stated) is None)
    if not _serves(config) or unknown or config.surface("server").get("quantization"):
        return
    weights, fraction = engine(config, model)
    room = (fraction or 1) * capacity
    if weights * (1 - TOLERANCE) > room:
        raise ConfigError("an engine's weights alone exceed its memory limit", code="engine-exceeds-memory-limit",
                          got=f"about {weights / GIB:.1f} of {room / GIB:.1f} GiB",
                          who=who(config, "server.mem_fraction_static", "perf.rollout_num_gpus_per_engine"),
                          fix="raise --rollout-num-gpus-per-engine" + (
                              ", or serve weights in FP8 or INT4: miles convert hf-to-fp8, hf-to-int4"
                              if weights > capacity else ", or --sglang-mem-fraction-static"))


def _share(config: RunConfig, model: ModelDimensions, needed: float, capacity: float) -> None:
    """
    Raises:
        ConfigError: trainer and engine share the GPU, neither makes room, and together they are too large.
    """
    perf, fraction = config.perf, config.surface("server").get("mem_fraction_static")
    if not (_serves(config) and perf.colocate) or perf.offload_train or perf.offload_rollout or fraction is None:
        return
    engine_, room = fraction * capacity, capacity - OUTSIDE
    if needed * (1 - TOLERANCE) + engine_ > room:
        raise ConfigError(
            "trainer and engine share the GPU, both stay in its memory, and both do not fit",
            code="colocated-memory-exceeded",
            got=f"about {needed / GIB:.0f} + {engine_ / GIB:.0f} of {room / GIB:.0f} GiB",
            who=who(config, "server.mem_fraction_static", "perf.offload_train", "perf.offload_rollout"),
            fix="alternate them (--offload-rollout, --offload-train), or lower --sglang-mem-fraction-static")


def peak(config: RunConfig, model: ModelDimensions) -> float:
    """Bytes of the trainer that torch's allocator counts."""
    return sum(trainer(config, model).values())


def _remedies(config: RunConfig, capacity: float) -> Iterator[str]:
    """Single changes after which the run fits, and what it then takes."""
    perf, tensor = config.perf, layout_of(config).tensor
    tries: dict[str, RunConfig] = {"--recompute-granularity full": config.with_surface(
        "megatron", recompute_granularity="full")}
    limit = perf.max_tokens_per_gpu if perf.use_dynamic_batch_size else None
    while limit and limit > 2048:
        limit //= 2
        tries[f"--max-tokens-per-gpu {limit}"] = replace(config, perf=replace(perf, max_tokens_per_gpu=limit))
    if config.optimizer.optimizer in MUON:
        tries[f"--optimizer {LAYER_WISE}"] = replace(config, optimizer=replace(config.optimizer, optimizer=LAYER_WISE))
    else:
        tries["--optimizer-cpu-offload"] = config.with_surface("megatron", optimizer_cpu_offload=True)
    twice = replace(config, perf=replace(perf, actor_num_gpus_per_node=2 * perf.actor_num_gpus_per_node))
    tries[f"--tensor-model-parallel-size {2 * tensor} on twice the GPUs"] = twice.with_surface(
        "megatron", tensor_model_parallel_size=2 * tensor, sequence_parallel=True)
    pipeline, nodes = layout_of(config).pipeline, config.perf.actor_num_nodes
    for times in (2, 4, 8, 16, 32):
        more = replace(config, perf=replace(perf, actor_num_nodes=nodes * times))
        tries[f"--pipeline-model-parallel-size {pipeline * times} on {times} times the GPUs"] = more.with_surface(
            "megatron", pipeline_model_parallel_size=pipeline * times)
    named = set()
    for text, other in tries.items():
        needed, flag = peak(other, dimensions_of(other)), text.partition(" ")[0]
        if needed < capacity - OUTSIDE and flag not in named:  # the largest limit of tokens, the fewest GPUs
            named.add(flag)
            yield f"{text} ({needed / GIB:.0f} GiB)"


def _engine_beside(config: RunConfig, model: ModelDimensions) -> str:
    """What an engine takes of the GPU that the trainer does not fit."""
    if not _serves(config):
        return ""
    weights, _ = engine(config, model)
    return f"; an engine's weights {weights / GIB:.0f} GiB"


def _serves(config: RunConfig) -> bool:
    """Whether servers take memory of this run's GPUs by fields of [sglang]."""
    return "server_args" in config.understood and "external" not in config.understood


def lines(config: RunConfig) -> list[str]:
    """What the plan says about the memory of a GPU; nothing for a run without GPUs."""
    model, capacity = dimensions_of(config), capacity_of(config)
    served = _serves(config)
    if model is None or (capacity is None and not served):
        return []
    of = f" of {capacity / GIB:.1f}" if capacity else ""
    rows, parts = [], {}
    if not config.debug.debug_rollout_only:
        parts = trainer(config, model)
        rows.append(f"  trainer  {sum(parts.values()) / GIB:.1f}{of} GiB at {tokens_of(config, model.layout)} tokens: "
                     f"{_sum(parts)}")
    if served:
        weights, fraction = engine(config, model)
        whole = f"{fraction * capacity / GIB:.1f}{of} GiB" if fraction and capacity else "SGLang's mem_fraction_static"
        cache = f" {max(0.0, fraction * capacity - weights) / GIB:.1f}" if fraction and capacity else " the rest"
        rows.append(f"  engine   {whole}: weights {weights / GIB:.1f}, KV cache{cache}")
        if capacity:
            most = (fraction or 1) * capacity - weights - (0 if fraction else OUTSIDE)
            verdict = (f"fits, with room for {most / engine_weights.cache(config, model):,.0f} tokens"
                       f"{'' if fraction else ' at most'}" if most > 0 else "does not fit")
            rows.append(f"  an engine on {config.perf.rollout_num_gpus_per_engine} GPUs {verdict}")
            rows += _both(config, model, parts, weights, capacity)
    return ["", "memory of a GPU, estimated", *rows] if rows else []


def _both(config: RunConfig, model: ModelDimensions, parts: Mapping[str, float], weights: float, capacity: float,
          ) -> Iterator[str]:
    """That a trainer which leaves the GPU for each rollout could stay, where an engine beside it has room for all
    answers that it may have at once.

    Args:
        parts: of the trainer's memory; none where there is no trainer.
        weights: of an engine.
    """
    perf, rollout = config.perf, config.rollout
    if not (parts and perf.colocate and perf.offload_train):
        return
    state = sum(parts[name] for name in ("weights", "gradients", "optimizer"))
    room = (capacity - OUTSIDE - state) * (1 - TOLERANCE) - weights
    engines = max(1, trainer_gpus(config) // perf.rollout_num_gpus_per_engine)
    answers = (rollout.rollout_batch_size or 1) * rollout.n_samples_per_prompt / engines
    tokens = room / engine_weights.cache(config, model)
    if tokens > answers * rollout.rollout_max_response_len:
        moved = state - parts["gradients"]
        yield (f"  both     fit: with --no-offload-train {moved / GIB:.1f} GiB stay that a rollout moves out and back, "
               f"and an engine has room for {tokens:,.0f} tokens")


def staging(config: RunConfig) -> float | None:
    """Bytes of host memory that --async-save takes of a rank that writes: its part of a checkpoint, in which the
    optimizer has three float32 numbers a parameter, of Muon's matrices two; None where config.json leaves out what the
    plan needs."""
    model = dimensions_of(config)
    if model is None:
        return None
    layer_wise, parts = config.optimizer.optimizer == LAYER_WISE, []
    for stage in (0, model.layout.pipeline - 1):
        state = (estimate.state_of_a_rank(config, model, stage, 3 * FP32) if layer_wise
                 else sum(estimate.state_of(config, model, stage, 3 * FP32)))
        weights = model.value * sum(estimate.parameters_of(config, model, stage))
        parts.append(weights + (0 if config.checkpoint.no_save_optim else state))
    return max(parts)


def _sum(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())


def capacity_of(config: RunConfig) -> float | None:
    """Bytes of a GPU: --gpu-memory-gib, else those of this machine's smallest; None without either."""
    stated = config.perf.gpu_memory_gib
    if stated is not None:
        return stated * GIB
    return _smallest() if gpus() else None


@functools.cache
def _smallest() -> float | None:
    """Asked of NVML, the library behind nvidia-smi, which makes no CUDA context."""
    class Memory(ctypes.Structure):
        _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]

    try:
        nvml, count = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_uint()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return None
    except (OSError, AttributeError):
        return None
    sizes = []
    for index in range(count.value):
        device, memory = ctypes.c_void_p(), Memory()
        if not nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) and not nvml.nvmlDeviceGetMemoryInfo(
                device, ctypes.byref(memory)):
            sizes.append(float(memory.total))
    nvml.nvmlShutdown()
    return min(sizes, default=None)
