"""Gradients to new weights: AdamW or Muon over sharded parameters, Megatron's schedules, and clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from miles_local.muon_options import MUON

from miles_core.config.tables import Optimizer
from miles_core.errors import ConfigError, HookError, NonFiniteError
from miles_core.stages.gradients import Gradients, Piece
from miles_fsdp.adamw import ShardedAdamW, local
from miles_fsdp.muon import OUTPUTS, Muon, output_axes
from miles_fsdp.plugin import FsdpOptions
from miles_fsdp.ranks import Ranks
from miles_fsdp.tensor_parallel import is_split


@dataclass(frozen=True, slots=True)
class Schedule:
    """The learning rate after a number of optimizer steps, as Megatron-LM's schedules have it.

    Args:
        warmup: steps of linear warm-up from 0; may be a fraction. decay: the step at which `least` is reached.
    """

    style: str
    most: float
    least: float
    warmup: float
    decay: int

    @classmethod
    def of(cls, options: Optimizer, steps: int) -> Schedule:
        """
        Args:
            steps: of the whole run.

        Raises:
            ConfigError: the warm-up leaves no steps for the decay, or the lowest rate is above the highest.
        """
        decay = steps if options.lr_decay_iters is None else options.lr_decay_iters
        warmup = options.lr_warmup_iters or options.lr_warmup_fraction * decay
        if options.lr_decay_style != "constant" and warmup >= decay:
            raise ConfigError("the warmup leaves no steps for the decay", code="fsdp-warmup-too-long",
                              who="--lr-warmup-iters", got=f"{warmup} of {decay}", fix="shorten the warmup")
        if options.min_lr > options.lr:
            raise ConfigError("min_lr is above lr", code="fsdp-min-lr", got=options.min_lr, who="--min-lr",
                              fix=f"write at most {options.lr}")
        return cls(options.lr_decay_style, options.lr, options.min_lr, warmup, max(decay, int(warmup) + 1))

    def rate(self, done: int) -> float:
        """After `done` steps."""
        if self.warmup > 0 and done <= self.warmup:
            return self.most * done / self.warmup
        if self.style == "constant":
            return self.most
        if done > self.decay:
            return self.least
        if self.style == "inverse-square-root":
            return max(self.least, self.most * math.sqrt(max(self.warmup, 1)) / math.sqrt(max(done, 1)))
        share = (done - self.warmup) / (self.decay - self.warmup)
        left = 1 - share if self.style == "linear" else (math.cos(math.pi * share) + 1) / 2
        return self.least + left * (self.most - self.least)


def optimizer_of(module: torch.nn.Module, options: Optimizer, own: FsdpOptions) -> torch.optim.AdamW:
    """With decoupled weight decay of matrices (arXiv:1711.05101); biases and norms have none.

    Parameters with a factor of the learning rate (`lr_mult`) are groups behind the others, the highest rate first.
    """
    axes = output_axes(module) if options.optimizer in MUON else {}
    groups: dict[tuple[bool, float, bool, int], list[torch.nn.Parameter]] = {}
    for name, one in module.named_parameters():
        if one.requires_grad:
            factor, plain = getattr(one, "lr_mult", 1.0), one.ndim == 1 or name.endswith("bias")  # experts' are stacked
            groups.setdefault((factor != 1.0, -factor, plain, axes.get(one, 0)), []).append(one)
    settings: list[dict[str, Any]] = [
        {"params": groups[apart, negative, plain, axis], "weight_decay": 0.0 if plain else options.weight_decay}
        | ({"lr_mult": -negative} if apart else {}) | ({OUTPUTS: axis} if axis else {})
        for apart, negative, plain, axis in sorted(groups)]
    adam: dict[str, Any] = {"lr": options.lr, "eps": options.adam_eps, "fused": True,
                            "betas": (options.adam_beta1, options.adam_beta2)}
    return Muon(settings, own, **adam) if options.optimizer in MUON else ShardedAdamW(settings, **adam)


class ShardedGradients:
    """See miles_core.stages.gradients.Gradients: what this rank holds of each parameter's gradient."""

    def __init__(self, model: str, module: torch.nn.Module, ranks: Ranks, clip_grad: float):
        self.model, self.clip_grad, self._ranks = model, clip_grad, ranks
        self.pieces: Sequence[Piece] = [
            Piece(name.removeprefix("model."), local(one.grad), local(one).detach(),
                  counts=ranks.first or is_split(one))
            for name, one in module.named_parameters() if one.grad is not None]

    def sums(self, values: Mapping[str, torch.Tensor | float]) -> dict[str, float]:
        return self._ranks.sums({name: float(value) for name, value in values.items()})

    def clip_by_norm(self) -> float:
        counted = self._norms()[[piece.counts for piece in self.pieces]]
        norm = math.sqrt(self.sums({"norm": counted.double().square().sum()})["norm"])
        if self.clip_grad > 0 and (scale := self.clip_grad / (norm + 1e-6)) < 1:
            torch._foreach_mul_([piece.grad for piece in self.pieces], scale)
        return norm

    def _norms(self) -> torch.Tensor:
        """[pieces] by a few kernels for all of them: one for each would take the host longer than the device."""
        return torch.stack(torch._foreach_norm([piece.grad for piece in self.pieces], dtype=torch.float32))

    def check_finite(self) -> None:
        """
        Raises:
            NonFiniteError: on every rank, if any of them holds NaN or infinity.
        """
        finite = self._norms().isfinite().tolist()  # asked once
        names = [piece.name for piece, good in zip(self.pieces, finite, strict=True) if not good]
        if odd := [name for part in self._ranks.gathered(names) for name in part]:
            raise NonFiniteError(f"the gradient of {odd[0]} is not finite", got=f"{len(set(odd))} parameter(s)",
                                 who=f"optimizer step of the {self.model}", code="fsdp-gradient-not-finite",
                                 fix="the weights are unchanged and the last checkpoint is good; "
                                 "look at the step's samples, the learning rate and the precision")


def update(optimizer: torch.optim.Optimizer, gradients: ShardedGradients, rate: float, clipping: str,
           clip: Callable[[Gradients], object]) -> dict[str, float]:
    """Clip and update; the norm before, and the rates of groups.

    Raises:
        NonFiniteError: a gradient is not finite; the optimizer has not seen it.
        HookError: the clipping answers with no number.
    """
    gradients.check_finite()
    norm = clip(gradients)
    if not isinstance(norm, (int, float)) or not math.isfinite(norm):
        raise HookError("a clipping of gradients should return their norm", code="fsdp-clipping-no-norm", got=norm,
                        who=f"clip_gradients {clipping!r}", fix="return a finite number")
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_mult", 1.0)
    optimizer.step()
    rates = {group.get("lr_mult", 1.0): group["lr"] for group in optimizer.param_groups}
    return {"grad_norm": float(norm)} | {f"lr-pg_{number}": one for number, one in enumerate(rates.values())}
