"""Layout: how the trainer's ranks split a model and a batch. What cannot work is refused before torch is imported.

The rules are megatron-core 0.16.1's, and where they are stricter than its own their reason stands beside them;
tests/unit/config/test_layout.py holds each against what megatron-core itself accepts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from miles_core.config.load import who
from miles_core.config.tables import RunConfig
from miles_core.errors import BatchError, ConfigError
from miles_megatron.architecture import NAMES, Architecture
from miles_megatron.heads import Compressed, OfLayers, sizes_of

KEYS = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "virtual_pipeline": "virtual_pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
    "expert_tensor": "expert_tensor_parallel_size",
}
"""Field of a layout -> megatron-core's name for it."""

UNEVEN = ("pipeline_model_parallel_layout", "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
          "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
"""With one of these the stages hold different numbers of layers, which megatron-core checks at the start."""

RANKS = ("perf.actor_num_nodes", "perf.actor_num_gpus_per_node")


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel dimensions; world = tensor x pipeline x context x data.

    Args:
        world: ranks of the trainer.
        virtual_pipeline: stages that each pipeline rank holds; None for one.
        expert: ranks that share out the experts.
        expert_tensor: ranks that share out each expert.
        data, expert_data: copies of the dense part and of the experts, which divide the same world.
        sequence_parallel: norms and residuals are split over the tensor-parallel ranks by tokens.
    """

    world: int = 1
    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    data: int = 1
    expert_data: int = 1
    sequence_parallel: bool = False

    @property
    def micro_batch_multiple(self) -> int:
        """Every rank's number of micro-batches is a multiple of it: the interleaved schedule wants whole groups."""
        return self.pipeline if self.virtual_pipeline else 1

    @property
    def sizes(self) -> str:
        """Such as "tp 2 + sp, pp 2 x vpp 2, cp 1, ep 2, etp 1, dp 2"; etp only where it differs from tp."""
        tensor = f"tp {self.tensor}" + (" + sp" if self.sequence_parallel else "")
        pipeline = f"pp {self.pipeline}" + (f" x vpp {self.virtual_pipeline}" if self.virtual_pipeline else "")
        expert = f"ep {self.expert}" + (f", etp {self.expert_tensor}" if self.expert_tensor != self.tensor else "")
        return f"{tensor}, {pipeline}, cp {self.context}, {expert}, dp {self.data}"

    def to_text(self) -> str:
        """One line."""
        return f"{self.sizes}: {self.world} rank{'s' * (self.world > 1)}"


def layout_of(config: RunConfig) -> Layout:
    """The layout that a run asks for: its ranks and Megatron-core's parallel sizes, with Megatron-core's defaults.

    Raises:
        BatchError: a size below 1, or ranks that do not divide by the sizes.
    """
    world = config.perf.actor_num_nodes * config.perf.actor_num_gpus_per_node
    requested = {name: config.surface("megatron").get(key) for name, key in KEYS.items()}
    for name, size in requested.items():
        if size is not None and size < 1:
            raise BatchError(f"{KEYS[name]} should be at least 1", got=size, who=_sizes(config, name),
                             fix="raise it, or leave it out", code="layout-size-not-positive")
    virtual = requested.pop("virtual_pipeline")
    stated = {name: size for name, size in requested.items() if size is not None}
    sizes = {"tensor": 1, "pipeline": 1, "context": 1, "expert": 1} | stated
    sizes.setdefault("expert_tensor", sizes["tensor"])
    shares = {}
    for copies, names in {"data": ("tensor", "pipeline", "context"),
                          "expert_data": ("expert_tensor", "pipeline", "expert")}.items():
        product = math.prod(sizes[name] for name in names)
        if world % product:
            raise _indivisible_world(config, world, {name: sizes[name] for name in names})
        shares[copies] = world // product
    return Layout(world, virtual_pipeline=None if virtual == 1 else virtual, **sizes, **shares,
                  sequence_parallel=bool(config.surface("megatron").get("sequence_parallel")))


def completed(config: RunConfig, note: Callable[[str], None]) -> RunConfig:
    """The layout with what follows from the rest of it, each with a note; none changes what is computed.

    --sequence-parallel has nothing to split over with one tensor-parallel rank, and Megatron-LM drops it as well; with
    more, Megatron-core trains no experts without it. Experts that as many tensor-parallel ranks as the dense layers
    have (Megatron-LM's default) do not fit are left whole, as Miles's own scripts for mixtures have them.
    """
    options, model = config.surface("megatron"), sizes_of(config)
    tensor, pipeline, expert = (options.get(KEYS[name]) or 1 for name in ("tensor", "pipeline", "expert"))
    if tensor == 1:
        if options.get("sequence_parallel"):
            note("sequence_parallel splits tokens over the tensor-parallel ranks, and there is one: it is left out")
            return config.with_surface("megatron", sequence_parallel=False)
        return config
    if model.experts and options.get("sequence_parallel") is None:
        note(f"sequence_parallel is on: nothing else trains {model.experts} experts ({model.source['experts']}) "
             f"with {KEYS['tensor']} {tensor}")
        config = config.with_surface("megatron", sequence_parallel=True)
    world = config.perf.actor_num_nodes * config.perf.actor_num_gpus_per_node
    if options.get(KEYS["expert_tensor"]) is None and expert > 1 and (
            world % (tensor * pipeline * expert) and not world % (pipeline * expert)):
        note(f"{KEYS['expert_tensor']} is 1: its default, {KEYS['tensor']} {tensor}, would take a multiple of "
             f"{tensor * pipeline * expert} ranks, and there are {world}")
        config = config.with_surface("megatron", **{KEYS["expert_tensor"]: 1})
    return config


def _indivisible_world(config: RunConfig, world: int, sizes: dict[str, int]) -> BatchError:
    wide = [name for name, size in sizes.items() if size > 1]
    product = math.prod(sizes.values())
    text = " x ".join(f"{KEYS[name]} {sizes[name]}" for name in wide) + f" = {product}" * (len(wide) > 1)
    ranks = f"{world} ranks do" if world > 1 else "1 rank does"
    return BatchError(f"the trainer's {ranks} not divide by {text}", code="ranks-not-divisible",
                      got=f"{config.perf.actor_num_nodes} nodes x {config.perf.actor_num_gpus_per_node} ranks",
                      who=who(config, *RANKS, *(f"megatron.{KEYS[name]}" for name in wide)),
                      fix=f"use a multiple of {product} ranks, or smaller sizes")


def share(config: RunConfig, name: str) -> int | None:
    """A width of the model on one rank: ffn of dense layers, expert_ffn, or values of all its heads."""
    layout, model = layout_of(config), sizes_of(config)
    whole, ranks = {"ffn": (model.ffn if model.mlps != model.sparse else None, layout.tensor),
                    "expert_ffn": (model.expert_ffn if model.experts else None, layout.expert_tensor),
                    "values": ((model.heads or 0) * (model.value_dim or 0), layout.tensor)}[name]
    return whole // ranks if whole else None


def check_layout(layout: Layout, architecture: Architecture, config: RunConfig) -> list[str]:
    """Refuse what cannot be trained in this layout.

    Args:
        architecture: what is not known of it is left to the start.

    Returns:
        What has to be announced.

    Raises:
        BatchError: the model or the batch does not divide.
        ConfigError: options that need each other, or exclude each other.
    """
    _host(layout, config)
    _combinations(layout, config)
    _experts(layout, architecture, config)
    for constant, names in _divisions(layout, architecture, config):
        _divides(layout, architecture, config, constant, names)
    _micro_batches(layout, config)
    _balance(architecture, config)
    return list(_notes(layout, config))


def _sizes(config: RunConfig, *names: str) -> str:
    return who(config, *(f"megatron.{KEYS[name]}" for name in names))


def _host(layout: Layout, config: RunConfig) -> None:
    if config.perf.trainer_host == "thread" and layout.world > 1:
        raise ConfigError('trainer_host = "thread" is the driver\'s process, which holds one rank',
                          code="thread-host-many-ranks", got=f"{layout.world} ranks",
                          who=who(config, "perf.trainer_host", *RANKS),
                          fix='trainer_host = "process", or actor_num_nodes = actor_num_gpus_per_node = 1')
    if config.perf.placement != "ray" and config.perf.actor_num_nodes > 1:
        raise ConfigError("spawned processes are all on the driver's machine; ranks on several nodes are Ray actors",
                          got=f"actor_num_nodes = {config.perf.actor_num_nodes}", code="spawned-ranks-many-nodes",
                          who=who(config, "perf.actor_num_nodes", "perf.placement"), fix='placement = "ray"')


def _combinations(layout: Layout, config: RunConfig) -> None:
    if layout.virtual_pipeline and layout.pipeline == 1:
        raise BatchError(f"{KEYS['virtual_pipeline']} {layout.virtual_pipeline} needs a pipeline to interleave",
                         code="virtual-pipeline-without-pipeline", got="pipeline_model_parallel_size = 1",
                         who=_sizes(config, "virtual_pipeline", "pipeline"),
                         fix="raise pipeline_model_parallel_size, or leave the virtual size out")
    group = config.surface("megatron").get("microbatch_group_size_per_vp_stage")
    if layout.virtual_pipeline and group not in (None, layout.pipeline):
        # Smaller is refused by megatron-core's schedule; larger would want another multiple of micro-batches.
        raise BatchError("microbatch_group_size_per_vp_stage should be the pipeline-parallel size", got=group,
                         who=who(config, "megatron.microbatch_group_size_per_vp_stage"), code="microbatch-group-size",
                         fix=f"leave it out, or write {layout.pipeline}")


def _experts(layout: Layout, architecture: Architecture, config: RunConfig) -> None:
    if architecture.experts and layout.tensor > 1 and not layout.sequence_parallel:
        raise BatchError("a mixture of experts is trained with tensor parallelism only if sequence_parallel is on too",
                         code="moe-needs-sequence-parallel",
                         got=f"tensor_model_parallel_size = {layout.tensor}, "
                         f"{architecture.experts} experts ({architecture.source['experts']})",
                         who=_sizes(config, "tensor"), fix="--sequence-parallel, or tensor_model_parallel_size = 1")
    if architecture.checkpoint and not architecture.experts:
        # An expert_tensor that repeats the tensor-parallel size says what megatron-core assumes anyhow.
        for name, allowed in (("expert", (1,)), ("expert_tensor", (1, layout.tensor))):
            if (size := getattr(layout, name)) not in allowed:
                raise BatchError(f"{KEYS[name]} {size} has no experts to split", got="a dense model",
                                 who=f"{_sizes(config, name)}, {architecture.source.get('layers')}",
                                 fix=f"leave {KEYS[name]} out", code="expert-layout-of-dense-model")


def cuts_groups(layout: Layout, architecture: Architecture) -> bool:
    """Whether several tensor-parallel ranks share a key and value: each computes it, and its own queries."""
    if isinstance(architecture, Compressed) or architecture.rank or architecture.groups is None:
        return False
    kinds = architecture.kinds if isinstance(architecture, OfLayers) else (architecture,)
    groups = [one.groups for one in kinds]
    fits = all(max(one, layout.tensor) % min(one, layout.tensor) == 0 for one in groups)
    return fits and layout.tensor > min(groups)


def _divisions(layout: Layout, architecture: Architecture, config: RunConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(constant, sizes whose product has to divide it)."""
    if not isinstance(architecture, Compressed):
        yield "heads", ("tensor",)
    if not isinstance(architecture, Compressed) and not cuts_groups(layout, architecture):
        yield "groups", ("tensor",)
        if isinstance(architecture, OfLayers):
            yield "fewest", ("tensor",)
    yield "vocab", ("tensor",)
    if architecture.linear:
        yield "linear_groups", ("tensor",)
        yield "linear_heads", ("tensor",)
    if architecture.mlps != architecture.sparse:
        yield "ffn", ("tensor",)
    if architecture.experts:
        yield "shared_ffn", ("tensor",)
        yield "expert_ffn", ("expert_tensor",)
        yield "experts", ("expert",)
    if not any(config.surface("megatron").get(key) for key in UNEVEN):
        yield "layers", ("pipeline",)
        yield "layers", ("pipeline", "virtual_pipeline")


def _divides(layout: Layout, architecture: Architecture, config: RunConfig, constant: str,
             names: tuple[str, ...]) -> None:
    number = getattr(architecture, constant)
    wide = {name: size for name in names if (size := getattr(layout, name) or 1) > 1}
    product = math.prod(wide.values())
    if number is None or number % product == 0:
        return
    fitting = ", ".join(str(size) for size in range(1, min(number, 2 * product) + 1) if number % size == 0)
    text = " x ".join(f"{KEYS[name]} {size}" for name, size in wide.items())
    what = "the product of both" if len(wide) > 1 else KEYS[next(iter(wide))]
    named = "num_global_key_value_heads" if constant == "fewest" else NAMES[constant][0][0]
    raise BatchError(f"{named} {number} does not divide by {text}", got=f"{number} / {product}",
                     who=f"{_sizes(config, *wide)}, {architecture.source.get(constant)}",
                     fix=f"make {what} one of {fitting}", code="model-size-not-divisible")


def _micro_batches(layout: Layout, config: RunConfig) -> None:
    """Every data-parallel rank runs the same number of micro-batches, a multiple of micro_batch_multiple."""
    perf, batch = config.perf, config.rollout.global_batch_size
    factors = {}
    if not perf.use_dynamic_batch_size:
        factors["perf.micro_batch_size"] = (f"micro_batch_size {perf.micro_batch_size}", perf.micro_batch_size)
    elif perf.max_tokens_per_gpu is None:
        raise BatchError("use_dynamic_batch_size needs max_tokens_per_gpu", code="max-tokens-missing",
                         who=who(config, "perf.use_dynamic_batch_size"), fix="--max-tokens-per-gpu 8192")
    if layout.data > 1:
        factors["perf.actor_num_gpus_per_node"] = (f"{layout.data} data-parallel ranks", layout.data)
    if layout.micro_batch_multiple > 1:
        factors[f"megatron.{KEYS['virtual_pipeline']}"] = (
            f"{layout.pipeline} (an interleaved pipeline takes micro-batches by the pipeline size)", layout.pipeline)
    # Dynamic micro-batches too: if every sample were too long to share one, there would be global_batch_size of them.
    unit = math.prod(size for _, size in factors.values())
    if batch % unit:
        near = " or ".join(str(n) for n in (batch // unit * unit, (batch // unit + 1) * unit) if n)
        other = "" if perf.use_dynamic_batch_size else ", or --use-dynamic-batch-size"
        text = " x ".join(text for text, _ in factors.values())
        raise BatchError(f"global_batch_size {batch} does not divide by {text}", code="batch-not-divisible",
                         got=f"{batch} / {unit}", who=who(config, "rollout.global_batch_size", *factors),
                         fix=f"use a multiple of {unit}: {near}{other}")


def _balance(architecture: Architecture, config: RunConfig) -> None:
    if not config.perf.balance_by_flops:
        return
    if architecture.checkpoint and (missing := architecture.uncounted):
        raise ConfigError("balance_by_flops cannot count the operations of this architecture",
                          code="balance-architecture-unknown", got=f"no {', '.join(missing)} in config.json",
                          who=who(config, "perf.balance_by_flops"),
                          fix="leave it out: micro-batches are balanced by their tokens")


def _notes(layout: Layout, config: RunConfig) -> Iterator[str]:
    perf, longest = config.perf, config.rollout.rollout_max_response_len
    if perf.use_dynamic_batch_size and "perf.micro_batch_size" in config.origin:
        yield "use_dynamic_batch_size overrides micro_batch_size"
    if perf.max_tokens_per_gpu is not None and longest > perf.max_tokens_per_gpu * layout.context:
        limit = f"{perf.max_tokens_per_gpu}" + f" x context_parallel_size {layout.context}" * (layout.context > 1)
        yield (f"rollout_max_response_len {longest} is above max_tokens_per_gpu {limit}: "
               "a longer sample rides alone in a micro-batch that exceeds the budget")
    if layout.tensor > 1 and not layout.sequence_parallel:
        yield (f"tensor_model_parallel_size {layout.tensor} without sequence_parallel: each of these ranks holds the "
               "activations of all norms and residuals; --sequence-parallel splits them")


def check_layouts(config: RunConfig, note: Callable[[str], None]) -> RunConfig:
    """The configuration as it is.

    Raises:
        BatchError, ConfigError: a layout that cannot be trained.
    """
    for text in check_layout(layout_of(config), sizes_of(config), config):
        note(text)
    return config
