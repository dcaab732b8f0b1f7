"""Gradients to new weights: Megatron's DDP wrapper, optimizer and learning-rate schedule from plain values."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from miles_local.muon_options import LAYER_WISE, MUON

from miles_core.errors import ConfigError
from miles_megatron import cpu
from miles_megatron.adam import prepare, step_in_slices
from miles_megatron.config_overrides import defaults_for, overrides_for
from miles_megatron.layer_wise import LayerWiseOptimizer, only_own
from miles_megatron.muon import divided, take_over

cpu.install()

from megatron.core.distributed import (  # noqa: E402 - after install()
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.optimizer import (  # noqa: E402
    MegatronOptimizer,
    OptimizerConfig,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params  # noqa: E402
from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate  # noqa: E402
from megatron.core.optimizer_param_scheduler import ParamGroupOverride  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402

from miles_megatron.schedule import Schedule  # noqa: E402

logger = logging.getLogger(__name__)

STYLES = ("constant", "linear", "cosine", "inverse-square-root")


@dataclass(frozen=True, slots=True)
class OptimizerOptions:
    """AdamW with decoupled weight decay (arXiv:1711.05101) or Muon, and the schedule; iterations are optimizer steps.

    Args:
        lr: highest learning rate; min_lr: where decay ends; lr_warmup_init: where warmup begins.
        lr_decay_style: one of STYLES.
        lr_warmup_iters: steps of linear warmup; lr_warmup_fraction: or their share of the decay's steps.
        lr_decay_iters: step at which min_lr is reached, counted with the warmup; train_iters when None.
        train_iters: steps of the whole run; rollout_iters: those of a rollout.
        weight_decay: of matrices; Megatron exempts norms and biases.
        clip_grad: largest norm of all gradients; 0 for no clipping.
        use_distributed_optimizer: shard the optimizer's state over data-parallel ranks.
        grad_reduce_in_fp32: keep and sum gradients in fp32 also for bf16 models.
        overlap_grad_reduce, overlap_param_gather: hide communication; the latter needs the distributed optimizer.
        megatron: fields of OptimizerConfig and DistributedDataParallelConfig by name, which win over those above.
    """

    lr: float = 1e-6
    min_lr: float = 0.0
    lr_warmup_init: float = 0.0
    lr_decay_style: str = "constant"
    lr_warmup_iters: int = 0
    lr_warmup_fraction: float = 0.0
    lr_decay_iters: int | None = None
    train_iters: int = 1
    rollout_iters: int = 1
    weight_decay: float = 0.01
    optimizer: str = "adam"
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    use_distributed_optimizer: bool = True
    grad_reduce_in_fp32: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    megatron: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self):
        """
        Raises:
            ConfigError: an unknown style or an invalid number.
        """
        if self.lr_decay_style not in STYLES:
            raise ConfigError("unknown learning-rate schedule", got=self.lr_decay_style, who="--lr-decay-style",
                              fix="choose one of " + ", ".join(STYLES), code="lr-schedule-unknown")
        for name in ("lr", "min_lr", "lr_warmup_init", "lr_warmup_iters", "weight_decay", "clip_grad"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} cannot be negative", code="lr-negative", got=getattr(self, name),
                                  who="--" + name.replace("_", "-"), fix="write 0 or more")
        for name in ("min_lr", "lr_warmup_init"):
            if getattr(self, name) > self.lr:
                raise ConfigError(f"{name} is above lr = {self.lr}", code="lr-out-of-range", got=getattr(self, name),
                                  who="--" + name.replace("_", "-"), fix="write at most lr")
        if self.lr_decay_style != "constant" and self.warmup_iters >= self.decay_iters:
            raise ConfigError("the warmup leaves no steps for the decay", code="lr-warmup-too-long",
                              who="--lr-warmup-iters", got=f"{self.warmup_iters} of {self.decay_iters}",
                              fix="shorten the warmup")

    @property
    def warmup_iters(self) -> float:
        """Steps of warmup; as in Megatron-LM a share may be a fraction of a step."""
        return self.lr_warmup_iters or self.lr_warmup_fraction * self.decay_iters

    @property
    def decay_iters(self) -> int:
        return self.train_iters if self.lr_decay_iters is None else self.lr_decay_iters


def rounded(config: TransformerConfig, chunk: torch.nn.Module) -> Float16Module:
    """The chunk with parameters in 16 bits. Buffers stay in float32: a router's bias, and the counts it is made of.

    Megatron rounds them too, and widens what is left of the bias again when the router is next called.
    """
    buffers = [(module, name, buffer) for module in chunk.modules()
               for name, buffer in module.named_buffers(recurse=False) if buffer.is_floating_point()]
    whole = Float16Module(config, chunk)
    for module, name, buffer in buffers:
        module._buffers[name] = buffer
    return whole


def wrap(
    chunks: Sequence[torch.nn.Module], config: TransformerConfig, options: OptimizerOptions
) -> list[DistributedDataParallel]:
    """Model chunks with fp32 gradient buffers that `finalize_model_grads` sums over data-parallel ranks.

    The sum is not divided by the number of ranks, because miles divides in the loss (stages/loss.py); that is what
    `calculate_per_token_loss` means to DDP; `transformer_config` sets it, as routers look when they are made.
    """
    low = config.bf16 or config.fp16
    with _refusals("[perf] and [optimizer]"):
        ddp = DistributedDataParallelConfig(**_fields(
            DistributedDataParallelConfig, options.megatron,
            use_distributed_optimizer=options.use_distributed_optimizer,
            grad_reduce_in_fp32=options.grad_reduce_in_fp32,
            overlap_grad_reduce=options.overlap_grad_reduce, overlap_param_gather=options.overlap_param_gather,
        ))  # fmt: skip
        wrapped = [
            DistributedDataParallel(config, ddp, rounded(config, part) if low else part, disable_bucketing=i > 0)
            for i, part in enumerate(chunks)
        ]
    if ddp.overlap_grad_reduce:
        # Only a step's last micro-batch may start the reduction.
        config.no_sync_func = wrapped[0].no_sync if len(wrapped) == 1 else [chunk.no_sync for chunk in wrapped]
    return wrapped


def _fields(kind: type, overrides: Mapping[str, object], **ours: object) -> dict[str, object]:
    """Megatron-LM's defaults, ours, then the run's options."""
    return {**defaults_for(kind), **ours, **overrides_for(kind, overrides)}


@contextmanager
def _refusals(who: str) -> Iterator[None]:
    """Turn Megatron's rejection into a ConfigError."""
    try:
        yield
    except (AssertionError, ValueError, ImportError, TypeError, NotImplementedError) as error:
        raise ConfigError("Megatron rejects these options", got=str(error).strip() or type(error).__name__, who=who,
                          fix="change the keys that it names", code="megatron-rejects-options") from error


def make_optimizer(
    chunks: Sequence[DistributedDataParallel], options: OptimizerOptions
) -> tuple[MegatronOptimizer, Schedule]:
    """The optimizer of wrapped chunks and its schedule, which already set the first step's learning rate."""
    config, overrides, muon = chunks[0].config, dict(options.megatron), options.optimizer in MUON
    if cpu.no_cuda() and overrides.pop("optimizer_cpu_offload", False):
        logger.warning("optimizer_cpu_offload has nothing to do: without a GPU the optimizer is on the CPU already")
    with _refusals("[optimizer]"):
        settings = OptimizerConfig(**_fields(
            OptimizerConfig, overrides,
            optimizer="adam" if muon else options.optimizer, lr=options.lr, min_lr=options.min_lr,
            weight_decay=options.weight_decay, adam_beta1=options.adam_beta1, adam_beta2=options.adam_beta2,
            adam_eps=options.adam_eps, clip_grad=options.clip_grad, bf16=config.bf16, params_dtype=config.params_dtype,
            use_distributed_optimizer=options.use_distributed_optimizer,
            overlap_param_gather=options.overlap_param_gather,
            muon_fp32_matmul_prec="medium" if config.bf16 else "highest",
        ))  # fmt: skip
        if muon and settings.use_distributed_optimizer:
            raise ValueError("use_distributed_optimizer cuts parameters where Muon needs whole matrices")
        own_rates, division = _own_rates(settings, chunks), divided(chunks) if options.optimizer == LAYER_WISE else []
        with only_own(division):
            optimizer = get_megatron_optimizer(settings, list(chunks), own_rates)
    if muon:
        take_over(optimizer, chunks, settings)
    if options.optimizer == LAYER_WISE:
        optimizer = LayerWiseOptimizer(optimizer.chained_optimizers, division)
    if settings.use_precision_aware_optimizer and not settings.optimizer_cpu_offload:
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            step_in_slices(part.optimizer)
    scheduler = Schedule(
        options.rollout_iters, optimizer, init_lr=options.lr_warmup_init, max_lr=options.lr, min_lr=options.min_lr,
        lr_warmup_steps=options.warmup_iters,
        # Megatron wants room for decay even where the style has none.
        lr_decay_steps=max(options.decay_iters, int(options.warmup_iters) + 1), lr_decay_style=options.lr_decay_style,
        start_wd=options.weight_decay, end_wd=options.weight_decay, wd_incr_steps=1, wd_incr_style="constant",
        # On a resume the run's own options hold; the checkpoint only says how many steps were done.
        use_checkpoint_opt_param_scheduler=False, override_opt_param_scheduler=True,
    )  # fmt: skip
    gather_in_place(optimizer)
    return optimizer, scheduler


def _own_rates(settings: OptimizerConfig, chunks: Sequence[torch.nn.Module]) -> dict[ParamKey, ParamGroupOverride]:
    """Megatron's own groups, and those of parameters with a factor of the learning rate.

    It finds a group in a checkpoint by `lr_mult` and `is_decoupled_lr`, so groups with rates of their own say both.
    """
    overrides = get_standard_config_overrides(settings)
    for override in overrides.values():
        override |= {"is_decoupled_lr": True} if "max_lr" in override else {}
    factors = {parameter.lr_mult for chunk in chunks for parameter in chunk.parameters()
               if parameter.requires_grad and hasattr(parameter, "lr_mult")}
    keys = {factor: ParamKey(with_name_predicate=ParamWithNamePredicate(
        f"lr_mult {factor}", lambda parameter, _name, own=factor: getattr(parameter, "lr_mult", None) == own))
        for factor in factors}
    return overrides | {
        key: ParamGroupOverride(max_lr=settings.lr * factor, min_lr=settings.min_lr * factor, lr_mult=factor)
        for factor, key in keys.items()}


def rates(optimizer: MegatronOptimizer) -> dict[str, float]:
    """Rates of the next step: lr-pg_0 is the run's own, if anything has it; of others the highest come first."""
    by_group = {(not group["default_config"], -group["max_lr"]): group["lr"] for group in optimizer.param_groups}
    return {f"lr-pg_{number}": by_group[key] for number, key in enumerate(sorted(by_group))}


def zero_gradients(chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
    """Before the first micro-batch of every optimizer step."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()


def non_finite_gradients(chunks: Sequence[DistributedDataParallel]) -> list[str]:
    """Names of parameters whose gradient holds NaN or infinity on any rank; every rank gets the same list.

    Call it after `finalize_model_grads` and before the optimizer step. It costs one sum over the gradient buffers:
    a sum is finite only if all it adds is, so names are looked for only when one is not.
    """
    buffers = [b for chunk in chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    suspect = not all(bool(torch.isfinite(buffer.grad_data.sum())) for buffer in buffers)
    if dist.get_world_size() > 1:
        flag = torch.tensor([float(suspect)], device=buffers[0].grad_data.device if buffers else None)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        suspect = bool(flag)
    if not suspect:
        return []
    names = [
        name.removeprefix("module.").removeprefix("module.")
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
        if parameter.requires_grad and not torch.isfinite(parameter.main_grad).all()
    ]
    if dist.get_world_size() > 1:
        gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, names)
        names = list(dict.fromkeys(name for part in gathered for name in part))
    return names


def prepare_state(optimizer: MegatronOptimizer) -> None:
    """Give torch's AdamW the state that it has after its first step, which saving and loading take for granted.

    The fused optimizers of Transformer Engine and Apex make theirs when asked to.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups if isinstance(part.optimizer, torch.optim.Adam) else ():
            for parameter in group["params"]:
                prepare(part.optimizer, parameter)


class _InPlace(dict[int, torch.Tensor]):
    """Stands for a buffer of all parameters' state, one after the other: a slice is the state that begins there."""

    def __getitem__(self, where: slice) -> torch.Tensor:
        return super().__getitem__(where.start)


def gather_in_place(optimizer: MegatronOptimizer) -> None:
    """Where a rank has all of the state that its DistributedOptimizer shards, what is saved is that state itself.

    Megatron copies it four times, as it has to where it is gathered.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part, DistributedOptimizer) and part.data_parallel_group.size() == 1:
            part.get_parameter_state_dp_zero = partial(_whole_state, part, part.get_parameter_state_dp_zero)


def _whole_state(part: DistributedOptimizer, gather: Callable[..., dict], *, empty_data: bool = False,
                 **how: bool) -> dict:
    """Megatron's get_parameter_state_dp_zero (`gather`): number of a buffer -> dtype -> name -> all its state."""
    if empty_data:
        return gather(empty_data=True, **how)
    state: dict = {"buckets_coalesced": True}
    for number, (buffer, ranges) in enumerate(zip(part.buffers, part.gbuf_ranges, strict=True)):
        whole = {name: _InPlace() for name in ("param", "exp_avg", "exp_avg_sq")}
        for parameter, (begin, _, _) in buffer.param_index_map.items():
            tensors = part._get_main_param_and_optimizer_states(parameter)
            for name, in_place in whole.items():
                in_place[begin] = tensors[name].detach().float()
        state[number] = dict.fromkeys(ranges, whole)
    return state


def load_state(
    optimizer: MegatronOptimizer, scheduler: Schedule, optimizer_state: dict, scheduler_state: dict
) -> None:
    """Go on exactly where the state was saved, under the options that the optimizer was made with."""
    optimizer_state = _regrouped(optimizer, optimizer_state)
    _take_own_groups(optimizer, optimizer_state)
    _restore_zero_step(optimizer_state)
    _restore_empty_groups(optimizer, optimizer_state)
    optimizer.load_state_dict(optimizer_state)
    scheduler.load_state_dict(scheduler_state)


def _take_own_groups(optimizer: MegatronOptimizer, state: dict) -> None:
    """Groups are this run's, as its options make them: of those in a checkpoint only the count of steps is kept.

    Megatron looks its groups up among the saved ones by their factors, and ends where one is new.
    """
    for part, own in _states(optimizer, state):
        inner = own.get("optimizer", own)
        if saved := inner.get("param_groups"):
            count = next(({"step": one["step"]} for one in saved if "step" in one), {})  # a fused Adam's
            inner["param_groups"] = [{**group, **count} for group in part.optimizer.state_dict()["param_groups"]]


def _restore_zero_step(state: dict) -> None:
    """Megatron leaves the common step of an optimizer that did none out of what it saves, and then asks for it."""
    for part in state.values() if all(isinstance(key, int) for key in state) else (state,):
        for where in (part, part.get("optimizer", {})):
            if where.get("state"):
                where["state"].setdefault("common_step", torch.tensor(0.0))


MASTERS = "fp32_from_fp16_params"


def numbered_groups(optimizer: MegatronOptimizer, sharded: dict, *, loading: bool) -> dict:
    """Masters by the number of their group, of groups that have any on this rank; to load, no groups of its own.

    Megatron has a list of lists, of which the empty ones would be saved with what is common to all ranks.
    """
    for _, state in _states(optimizer, sharded):
        if loading:  # the saved ones need not be as many
            state.get("optimizer", state).pop("param_groups", None)
        if MASTERS in state:
            state[MASTERS] = {number: group for number, group in enumerate(state[MASTERS]) if group}
    return sharded


def _restore_empty_groups(optimizer: MegatronOptimizer, state: dict) -> None:
    """The inverse of `numbered_groups`."""
    for part, own in _states(optimizer, state):
        if isinstance(part, Float16OptimizerWithFloat16Params):
            own[MASTERS] = [own.get(MASTERS, {}).get(number, []) for number in range(len(part.param_groups))]


def _states(optimizer: MegatronOptimizer, state: dict) -> Iterator[tuple[MegatronOptimizer, dict]]:
    """Megatron's optimizers, and what each saves or loads of a state of all."""
    parts = getattr(optimizer, "chained_optimizers", None) or [optimizer]
    yield from ((part, state if len(parts) == 1 else state[number]) for number, part in enumerate(parts))


def _regrouped(optimizer: MegatronOptimizer, state: dict) -> dict:
    """With expert parallelism Megatron has two optimizers, dense and expert, else one: let either load the other's.

    What is sharded was asked for, and so lies as this optimizer wants it, by number where there are two; what is
    common (groups, step) lies as it was saved.
    """
    numbered = {key: value for key, value in state.items() if isinstance(key, int)}
    common = {key: value for key, value in state.items() if not isinstance(key, int)}
    parts = getattr(optimizer, "chained_optimizers", None) or [optimizer]
    if len(parts) == 1:
        return _fitted(common, numbered[0]) if numbered else state
    if "optimizer" not in common and "param_groups" not in common:
        return state
    return {number: _fitted(numbered.get(number, {}), common) for number in range(len(parts))}


def _fitted(sharded: dict, saved: dict) -> dict:
    """What one optimizer loads, of what it asked for and of what is common to all that were saved."""
    template, common = sharded.get("optimizer", sharded), saved.get("optimizer", saved)
    if "state" not in template:  # the distributed optimizer asks for tensors alone
        return {**saved, **sharded, "optimizer": {**common}}
    inner = {**common, "state": {**common["state"], **template["state"]}}
    return {**sharded, "optimizer": inner} if "optimizer" in sharded else inner
