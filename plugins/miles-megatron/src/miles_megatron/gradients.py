"""The step behind the hook `clip_gradients`: gradients to the optimizer's own, clipping, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from miles_core.errors import HookError, NonFiniteError
from miles_core.stages.gradients import Gradients, Piece
from miles_megatron import cpu
from miles_megatron.weights import EMBEDDING, global_parameters

cpu.install()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402 - after install()
from megatron.core.optimizer import MegatronOptimizer  # noqa: E402
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32  # noqa: E402
from megatron.core.transformer.module import param_is_not_shared  # noqa: E402

OWN = ""
"""The clip group of all parameters that name none."""


def clip_groups(chunks: Sequence[torch.nn.Module]) -> tuple[str, ...]:
    """The clip groups of a model, OWN first; every rank calls it, and knows those of all."""
    mine = {getattr(p, "clip_group", OWN): 0.0 for chunk in chunks for p in chunk.parameters() if p.requires_grad}
    return tuple(sorted({OWN, *gathered(mine)}))


class MegatronGradients:
    """See stages.gradients.Gradients. Made for each step, after `optimizer.prepare_grads()`.

    Args:
        groups: of `clip_groups`; `update` has each clipped as if its parameters were the whole model.
    """

    def __init__(self, model: str, optimizer: MegatronOptimizer, chunks: Sequence[torch.nn.Module], clip_grad: float,
                 groups: Sequence[str] = (OWN,)):
        self.model, self.clip_grad, self.groups = model, clip_grad, groups
        self._optimizer, self._chunks = optimizer, chunks
        self._pieces: list[Piece] | None = None
        self._group: str | None = None
        self._apart: dict[str, str] = {}
        # What a rank has of experts is no copy where they are cut by other ranks than dense layers: a norm without it,
        # and the clipping by it, would be too small. Megatron asks the dense layers' ranks.
        for part in _parts(optimizer):
            if part.optimizer.param_groups[0]["is_expert_parallel"]:
                part.tp_group = parallel_state.get_expert_tensor_parallel_group()

    @property
    def pieces(self) -> list[Piece]:
        if self._pieces is None:
            named = global_parameters(self._chunks)
            names = {parameter: name for name, parameter in named.items()}
            self._pieces = [piece for part in _parts(self._optimizer) for piece in _pieces(part, names)]
            self._apart = {name: parameter.clip_group for name, parameter in named.items()
                           if hasattr(parameter, "clip_group")}
        return [piece for piece in self._pieces if self._group in (None, self._apart.get(piece.name, OWN))]

    @contextmanager
    def only(self, group: str) -> Iterator[None]:
        """Inside, the parameters of a clip group are all there are, for `pieces` and for Megatron's optimizers."""
        if len(self.groups) == 1:
            yield
            return
        _ = self.pieces  # while Megatron still counts all parameters
        parameters = [parameter for chunk in self._chunks for parameter in chunk.parameters()]
        mine = {id(updated) for part in _parts(self._optimizer) for parameter, updated in _held(part, parameters)
                if getattr(parameter, "clip_group", OWN) == group}
        settings = [each for part in _parts(self._optimizer) for each in part.optimizer.param_groups]
        whole = [each["params"] for each in settings]
        try:
            self._group = group
            for each in settings:
                each["params"] = [updated for updated in each["params"] if id(updated) in mine]
            yield
        finally:
            self._group = None
            for each, params in zip(settings, whole, strict=True):
                each["params"] = params

    def sums(self, values: Mapping[str, torch.Tensor | float]) -> dict[str, float]:
        by_rank = gathered({name: float(value) for name, value in values.items()})
        return {name: math.fsum(each) for name, each in by_rank.items()}

    def clip_by_norm(self) -> float:
        norm = float(self._optimizer.get_grad_norm())
        if self.clip_grad > 0:
            for part in _parts(self._optimizer):
                clip_grad_by_total_norm_fp32(part.get_parameters(), self.clip_grad, norm, _decoupled(part))
        return norm


def gathered(values: Mapping[str, float], group: dist.ProcessGroup | None = None) -> dict[str, list[float]]:
    """Numbers by name of all ranks of a group, by default of all there are; ranks may have different names."""
    ranks: list[dict[str, float]] = [dict(values)] * dist.get_world_size(group)
    if len(ranks) > 1:
        dist.all_gather_object(ranks, dict(values), group=group)
    names = dict.fromkeys(name for each in ranks for name in each)
    return {name: [each[name] for each in ranks if name in each] for name in names}


def update(optimizer: MegatronOptimizer, gradients: MegatronGradients, clip: Callable[[Gradients], float],
           name: str) -> dict[str, float]:
    """One optimizer step: what `clip` returns, having scaled the gradients, as grad_norm or GROUP_grad_norm.

    Args:
        name: of the clipping, for messages.

    Raises:
        HookError: it returned no number.
        NonFiniteError: the number, or what it left of a gradient, is not finite; the optimizer has not seen it.
    """
    overflow = optimizer.prepare_grads()
    who, norms = f"clip_gradients {name!r}, {gradients.model}", {}
    for group in gradients.groups:
        with torch.no_grad(), gradients.only(group):
            answer = None if overflow else clip(gradients)
        if not overflow and not isinstance(answer, int | float | torch.Tensor):
            raise HookError("clipping should return a number, which is reported as grad_norm", got=repr(answer),
                            who=who, code="clipping-returned-no-number", fix="return the norm before clipping")
        norm = math.nan if overflow else float(answer)
        if not math.isfinite(norm):
            raise NonFiniteError("the norm of the gradients is not finite", got=norm, who=who,
                                 fix="the weights are unchanged and the last checkpoint is good; look at the learning "
                                 "rate and the precision", code="gradient-norm-not-finite")
        norms[f"{group}_grad_norm" if group else "grad_norm"] = norm
    if name != "norm":  # Megatron's own multiplies by a finite number
        spoilt = gradients.sums({piece.name: 1.0 for piece in gradients.pieces if not torch.isfinite(piece.grad).all()})
        if spoilt:
            raise NonFiniteError(f"clipping left the gradient of {next(iter(spoilt))} not finite", who=who,
                                 got=f"{len(spoilt)} parameter(s)", code="clipped-gradient-not-finite",
                                 fix="the weights are unchanged; look for a division by a norm that may be 0")
    optimizer.step_with_ready_grads()
    return norms


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Its optimizers that have parameters on this rank: dense ones, and experts."""
    return [part for part in getattr(optimizer, "chained_optimizers", [optimizer]) if part.get_parameters()]


def _decoupled(part: MegatronOptimizer) -> bool:
    return part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8


def _pieces(part: MegatronOptimizer, names: Mapping[torch.nn.Parameter, str]) -> Iterator[Piece]:
    original = _original(part)
    for parameter, updated in _held(part, names):
        grad = getattr(updated, "decoupled_grad" if _decoupled(part) else "grad", None)
        if grad is not None:
            own = param_is_not_shared(updated)
            whole = tensor_parallel.param_is_not_tensor_parallel_duplicate(updated, getattr(part, "tp_group", None))
            yield Piece(names[parameter] if own else EMBEDDING, grad, updated.detach(), original and own and whole)


def _held(part: MegatronOptimizer,
          parameters: Iterable[torch.nn.Parameter]) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """(parameter of the model, what the optimizer updates in its place) of all that this rank updates."""
    where = getattr(part, "model_param_group_index_map", None)
    if where is not None:  # the distributed optimizer: a stretch of each parameter, often none
        groups = part.optimizer.param_groups
        yield from ((parameter, groups[group]["params"][index]) for parameter, (group, index) in where.items())
        return
    mine = {id(updated) for updated in part.get_parameters()}
    for parameter in parameters:
        updated = getattr(parameter, "main_param", parameter)
        if id(updated) in mine:
            yield parameter, updated


def _original(part: MegatronOptimizer) -> bool:
    """False where another data-parallel rank holds the same gradients; distributed optimizers hold each once."""
    if hasattr(part, "model_param_group_index_map") or part.get_grad_stats_parallel_group() is dist.group.WORLD:
        return True
    if part.optimizer.param_groups[0]["is_expert_parallel"]:
        return parallel_state.get_expert_data_parallel_rank() == 0
    return parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
