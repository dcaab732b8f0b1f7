"""What --plan says of Megatron's side: ranks, micro-batches, memory."""

from __future__ import annotations

from collections.abc import Iterator

from miles_core.config.tables import RunConfig
from miles_megatron import memory_plan, surface
from miles_megatron.layout import Layout, layout_of


def lines(config: RunConfig) -> Iterator[tuple[str, str]]:
    """(title, line), in the order of the plan."""
    layout = layout_of(config)
    yield "batch arithmetic", _micro_batches(config, layout)
    dtype = "bfloat16" if config.perf.bf16 else "float32"
    yield "layout", f"{_ranks(config, layout)}: {layout.sizes}, {dtype}"
    if not surface.is_installed():
        yield "layout", f"megatron-core {surface.version()} of {surface.root()}, instead of an installed one"
    for line in memory_plan.lines(config)[2:]:
        yield "memory", line.strip()
    if config.checkpoint.async_save and (size := memory_plan.staging(config)) is not None:
        yield "memory", f"host     {size / memory_plan.GIB:.3g} GiB of a rank that writes checkpoints (--async-save)"


def _ranks(config: RunConfig, layout: Layout) -> str:
    host = "ray" if config.perf.placement == "ray" else config.perf.trainer_host
    one, several = {"thread": ("a thread", "threads"), "process": ("a process", "processes"),
                    "ray": ("a Ray actor", "Ray actors")}[host]
    return f"1 trainer rank in {one}" if layout.world == 1 else f"{layout.world} trainer ranks in {several}"


def _micro_batches(config: RunConfig, layout: Layout) -> str:
    """What each data-parallel rank runs in a step."""
    perf, data, multiple = config.perf, layout.data, layout.micro_batch_multiple
    if perf.use_dynamic_batch_size:
        size = f"at most {perf.max_tokens_per_gpu * layout.context} tokens"
        size += f" ({perf.max_tokens_per_gpu} x cp {layout.context})" if layout.context > 1 else ""
        number = f"a multiple of {multiple} per step" if multiple > 1 else "the same number per step" * (data > 1)
    else:
        size = f"{perf.micro_batch_size} samples"
        number = f"{config.rollout.global_batch_size // (perf.micro_batch_size * data)} per step"
    text = f"micro-batches of {size}" + (f": {number}" if number else "")
    if data == 1:
        return text
    load = "operations" if perf.balance_by_flops else "tokens"
    dealt = f"balanced by {load}" if perf.balance_data else "dealt in turn"
    return f"{text} on each of {data} data-parallel ranks, {dealt}"
