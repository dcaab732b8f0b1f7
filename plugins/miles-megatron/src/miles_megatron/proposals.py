"""Layouts that fit a number of GPUs: all that divide, by the plan's own rules and its own estimate. No torch here.

What fits is put in order by `seconds`, a count of operations and traffic. It is good enough to prefer one layout to
another, and no prediction: nothing in it was measured.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from miles_local.muon_options import MUON

from miles_core.config.tables import RunConfig
from miles_core.errors import BatchError, ConfigError
from miles_megatron import engine_weights, estimate
from miles_megatron.estimate import ModelDimensions, dimensions_of, parameters
from miles_megatron.heads import heads_of
from miles_megatron.layout import KEYS, UNEVEN, Layout, check_layout, cuts_groups, layout_of
from miles_megatron.memory_plan import GIB, OUTSIDE, TOLERANCE, capacity_of, engine

FLOPS, NODE, NETWORK, HOST = 400e12, 200e9, 40e9, 5e9
"""Operations per second of a GPU; bytes per second within a node, between nodes, and of an optimizer in host memory.
Round numbers of H100s, which only have to stand in the right proportion."""

FRACTION = 0.8
"""Of a GPU's memory that an engine may fill, unless mem_fraction_static says otherwise."""

SEQUENCES = 8
"""Samples of full length whose keys and values an engine has to have room for."""

LAST = "num_layers_in_last_pipeline_stage"

SPARING: tuple[dict[str, object], ...] = (
    {}, {"recompute_granularity": "full"}, {"optimizer_cpu_offload": True},
    {"recompute_granularity": "full", "optimizer_cpu_offload": True})
"""Nothing, or what saves memory."""


@dataclass(frozen=True)
class Proposal:
    """A layout that fits.

    Args:
        config: the run in this layout.
        parts: bytes of a rank at its peak, by what they are.
        seconds: see the module.
    """

    config: RunConfig
    layout: Layout
    parts: Mapping[str, float]
    seconds: float

    @property
    def needed(self) -> float:
        """Bytes of a rank at its peak."""
        return sum(self.parts.values())

    @property
    def host(self) -> float:
        """Bytes of a node's host memory for weights and the optimizer's state: of both while engines sample on the same
        GPUs, of the latter always under --optimizer-cpu-offload."""
        perf, away = self.config.perf, self.config.surface("megatron").get("optimizer_cpu_offload")
        parked = perf.colocate and perf.offload_train is not False
        resident = self.config.with_surface("megatron", optimizer_cpu_offload=False)
        optimizer = estimate.trainer(resident, dimensions_of(resident))["optimizer"] if parked or away else 0.0
        return (parked * self.parts["weights"] + optimizer) * perf.actor_num_gpus_per_node

    def flags(self) -> list[str]:
        """The flags of `miles run` that say the layout."""
        perf, megatron = self.config.perf, self.config.surface("megatron")
        numbers = {"actor_num_nodes": perf.actor_num_nodes, "actor_num_gpus_per_node": perf.actor_num_gpus_per_node,
                   "rollout_num_gpus_per_engine": perf.rollout_num_gpus_per_engine}
        numbers |= {key: megatron[key] for key in (*KEYS.values(), LAST) if key in megatron}
        flags = [f"--{name.replace('_', '-')} {number}" for name, number in numbers.items()]
        flags += ["--sequence-parallel"] * self.layout.sequence_parallel
        flags += [f"--{name.replace('_', '-')}" + f" {value}" * (value is not True)
                  for name, value in megatron.items() if any(name in one for one in SPARING)]
        return [*flags, f"--use-dynamic-batch-size --max-tokens-per-gpu {perf.max_tokens_per_gpu}"]


def proposals(config: RunConfig, gpus: int, most: int = 1) -> list[Proposal]:
    """The best that fit so many GPUs, best first; empty where nothing does. A micro-batch holds the longest sample.

    Args:
        config: says model, memory of a GPU, GPUs of a node, longest sample and size of a batch. Its layout is left out.

    Raises:
        ConfigError: the model's shape or the memory of a GPU is not known.
    """
    best: list[Proposal] = []
    floors = [(seconds(laid_out, model), laid_out, model, room) for laid_out, model, room in _candidates(config, gpus)]
    for floor, laid_out, model, room in sorted(floors, key=lambda one: one[0]):
        if len(best) >= most and best[most - 1].seconds <= floor:
            break  # what saves memory costs time: none of the rest is better
        if (one := _spared(laid_out, model, room)) is not None:
            bisect.insort(best, one, key=lambda each: each.seconds)
    return best[:most]


def smallest(config: RunConfig, most: int = 4096) -> int | None:
    """The smallest power of two of GPUs that something fits; None where it is above `most`."""
    count = 1
    while count <= most:
        if any(_spared(laid_out, model, room) for laid_out, model, room in _candidates(config, count)):
            return count
        count *= 2
    return None


def _candidates(config: RunConfig, gpus: int) -> Iterator[tuple[RunConfig, ModelDimensions, float]]:
    """(the run in a layout, its model, bytes that it may take)."""
    base, model, capacity = known(config, gpus)
    each = engine_gpus(base, model, capacity, gpus)
    room = (capacity - OUTSIDE) * (1 - TOLERANCE)
    state = sum(parameters(model, model.size.layers, True, True)) * (model.value + estimate.FP32)
    if each is None or state / gpus > room:
        return
    base = replace(base, perf=replace(base.perf, rollout_num_gpus_per_engine=each))
    for laid_out in _laid_out(base, model, gpus):
        yield laid_out, replace(model, layout=layout_of(laid_out)), room


def known(config: RunConfig, gpus: int) -> tuple[RunConfig, ModelDimensions, float]:
    """(the run on so many GPUs without a layout, its model, bytes of a GPU).

    Raises:
        ConfigError: one of them is not known.
    """
    several = config.perf.actor_num_nodes > 1
    node = min(gpus, config.perf.actor_num_gpus_per_node if several else config.perf.num_gpus_per_node)
    if gpus % node:
        raise ConfigError("GPUs that do not fill their nodes", code="layouts-nodes-not-full", got=f"{gpus} / {node}",
                          who="--actor-num-gpus-per-node, --num-gpus-per-node", fix=f"use a multiple of {node}")
    layout = {*KEYS.values(), *UNEVEN, "sequence_parallel", *(name for one in SPARING for name in one)}
    others = {name: value for name, value in config.surface("megatron").items() if name not in layout}
    perf = replace(config.perf, actor_num_nodes=gpus // node, actor_num_gpus_per_node=node, placement="ray",
                   trainer_host=None, use_dynamic_batch_size=True, max_tokens_per_gpu=longest(config))
    batch = config.rollout.global_batch_size or 256
    base = replace(config, perf=perf, rollout=replace(config.rollout, global_batch_size=batch),
                   surfaces={**config.surfaces, "megatron": others})
    model, capacity = dimensions_of(base), capacity_of(base)
    if model is None:
        raise ConfigError("the model's shape is not known", code="layouts-model-unknown",
                          got=config.checkpoint.hf_checkpoint, who="checkpoint.hf_checkpoint",
                          fix="--hf-checkpoint FOLDER with a config.json that has the constants of its family")
    if capacity is None:
        raise ConfigError("the memory of a GPU is not known", code="layouts-memory-unknown", got="no GPU here",
                          who="perf.gpu_memory_gib", fix="--gpu-memory-gib 80")
    return base, model, capacity


def longest(config: RunConfig) -> int:
    """Tokens of the longest sample."""
    rollout = config.rollout
    return rollout.rollout_max_context_len or rollout.rollout_max_response_len + (rollout.rollout_max_prompt_len or 0)


def engine_gpus(config: RunConfig, model: ModelDimensions, capacity: float, gpus: int) -> int | None:
    """GPUs of the smallest engine that has room for its weights and SEQUENCES samples."""
    each = 1
    while each <= gpus and gpus % each == 0 and model.size.heads % each == 0:
        one = replace(config, perf=replace(config.perf, rollout_num_gpus_per_engine=each))
        weights, fraction = engine(one, model)
        if weights + SEQUENCES * longest(config) * engine_weights.cache(one, model) < (fraction or FRACTION) * capacity:
            return each
        each *= 2
    return None


def _laid_out(base: RunConfig, model: ModelDimensions, gpus: int) -> Iterator[RunConfig]:
    """Every layout that the plan accepts of so many GPUs. Tensor parallelism stays within a node."""
    size = model.size
    for tensor in _divisors(base.perf.actor_num_gpus_per_node):
        for pipeline in (stages for stages in _divisors(gpus // tensor) if stages <= size.layers):
            each = -(-size.layers // pipeline)
            last = size.layers - each * (pipeline - 1)
            for context in _divisors(gpus // tensor // pipeline):
                for expert in (_divisors(gpus // pipeline) if size.experts else [1]):
                    sizes = {"tensor": tensor, "pipeline": pipeline, "context": context, "expert": expert}
                    chosen = {KEYS[name]: count for name, count in sizes.items() if count > 1}
                    chosen |= {KEYS["expert_tensor"]: 1} if size.experts and tensor > 1 else {}
                    chosen |= {"sequence_parallel": True} if tensor > 1 else {}
                    chosen |= {LAST: last} if last not in (each, 0) else {}
                    tokens = -(-longest(base) // context)
                    one = replace(base, perf=replace(base.perf, max_tokens_per_gpu=tokens)).with_surface(
                        "megatron", **chosen)
                    if last > 0 and _accepted(one, model):
                        yield one


def _accepted(config: RunConfig, model: ModelDimensions) -> bool:
    layout = layout_of(config)
    try:
        check_layout(layout, model.size, config)
    except (BatchError, ConfigError):
        return False
    return not cuts_groups(layout, model.size)  # ranks that share keys gather them in every layer


def _spared(config: RunConfig, model: ModelDimensions, room: float) -> Proposal | None:
    """A layout with what costs least of SPARING and makes it fit."""
    fitting = []
    for spared in SPARING:
        if "optimizer_cpu_offload" in spared and config.optimizer.optimizer in MUON:
            continue
        one = config.with_surface("megatron", **spared)
        parts = estimate.trainer(one, model)
        if parts["weights"] + parts["gradients"] > room:
            break  # nothing spares these
        if sum(parts.values()) < room:
            fitting.append(Proposal(one, model.layout, parts, seconds(one, model)))
            if not spared:
                break
    return min(fitting, key=lambda one: one.seconds, default=None)


def seconds(config: RunConfig, model: ModelDimensions) -> float:
    """Of an optimizer step on a full batch of the longest samples, roughly."""
    size, layout, megatron = model.size, model.layout, config.surface("megatron")
    length, batch, value = longest(config), config.rollout.global_batch_size, model.value
    tokens = length * batch / layout.data  # of the ranks that share a copy of the model
    layers, node = estimate.layers_of(config, model, 0), config.perf.actor_num_gpus_per_node
    head = size.hidden * size.vocab
    # The slowest stage sets the pace: the first has most layers, the last has the output layer.
    ends = ((layers, layout.pipeline == 1), (estimate.layers_of(config, model, layout.pipeline - 1), True))
    operations = batch * max(estimate.flops(
        length, parameters=here / size.layers * (estimate.active_parameters(size) - head) + head * last,
        attention=here / size.layers * size.attention) for here, last in ends)

    def moved(elements: float, ranks: int, span: int) -> float:
        """Each rank of a group gets the others' share of so many numbers; the group lies within `span` GPUs."""
        return value * elements * (ranks - 1) / ranks / (NODE if span <= node else NETWORK)

    tensor, context = layout.tensor, layout.context
    each = 8 * moved(size.hidden * tokens / context, tensor, tensor)
    keys = sum(one.layers * one.groups * one.head_dim for one in heads_of(size)) / max(size.full, 1)
    each += 6 * moved(keys / tensor * tokens, context, tensor * context)
    copies = (size.experts_per_token or 0) * size.sparse / size.layers
    each += 4 * moved(size.hidden * tokens / context / tensor * copies, layout.expert, layout.expert)
    again = 4 / 3 if megatron.get("recompute_granularity") == "full" else 1.0
    passes = again * (operations / (layout.data * tensor * context) / FLOPS + layers * each)
    dense, experts = parameters(model, layers, True, True)
    step = 3 * (moved(dense, layout.data * context, layout.world) + moved(experts, layout.expert_data, layout.world))
    if megatron.get("optimizer_cpu_offload"):
        step += 16 * (dense / (layout.data * context) + experts / layout.expert_data) / HOST
    bubble = (layout.pipeline - 1) * layout.data / batch  # of a batch that is one sample a micro-batch
    return passes * (1 + bubble) + step


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def lines(config: RunConfig, gpus: int, count: int) -> Iterator[str]:
    """What `miles layouts` prints."""
    base, model, capacity = known(config, gpus)
    whole = sum(parameters(model, model.size.layers, True, True))
    met = estimate.active_parameters(model.size)
    yield (f"{whole / 1e9:,.1f}B parameters, {met / 1e9:,.1f}B of a token; samples of up to "
           f"{longest(config)} tokens, {base.rollout.global_batch_size} in a step")
    fitting = proposals(config, gpus, count)
    if not fitting:
        least = smallest(config)
        more = f"{least} are the smallest power of two that do" if least else "no power of two up to 4096 does"
        yield f"{gpus} GPUs of {capacity / GIB:g} GiB have no layout that fits: {more}"
    for number, one in enumerate(fitting, 1):
        weights, _ = engine(one.config, model)
        parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in one.parts.items())
        yield ""
        yield f"{number}. {one.layout.sizes}"
        yield f"   trainer  {one.needed / GIB:.1f} of {capacity / GIB:.1f} GiB: {parts}"
        yield f"   engine   {one.config.perf.rollout_num_gpus_per_engine} GPUs: weights {weights / GIB:.1f}"
        if one.host:
            yield f"   host     {one.host / GIB:,.0f} GiB of a node: the optimizer, and weights while engines sample"
        yield "   " + " ".join(one.flags())
