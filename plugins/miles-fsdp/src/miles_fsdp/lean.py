"""Norms and gated activations that keep for the backward pass what they were given, and nothing in between.

transformers writes a norm as eight operations, of which autograd keeps the rows in float32 and once more in 16 bits;
here it is one operation, which on a GPU is torch's own kernel, and keeps the rows that the layer has anyhow. The
activation of a gate is made again in the backward pass, on a GPU by liger-kernel where that is installed. Which modules
are of that kind is asked of them: what they say of a few rows has to be what these say.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, cast

import torch
import torch.nn.functional as F

Rows = Callable[[torch.Tensor], torch.Tensor]
GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}
"""What a gated layer consists of, in most architectures."""


def keep_less(model: torch.nn.Module) -> int:
    """Have a model's norms and gated layers compute in this way; how many of them do."""
    changed = 0
    for module in model.modules():
        forward = _norm(module) or _gated(module)
        if forward is not None and _agree(module, forward):
            module.forward = forward(module)
            changed += 1
    return changed


def _norm(module: torch.nn.Module) -> Callable[[Any], Rows] | None:
    """A root-mean-square norm over the last axis, made for a module; None where it has other parts than one."""
    name = "variance_epsilon" if hasattr(module, "variance_epsilon") else "eps"
    parameters = [one for one, _ in module.named_parameters()]
    if parameters != ["weight"] or not isinstance(getattr(module, name, None), float):
        return None

    def made(of: Any) -> Rows:
        plain = of.forward

        def normed(rows: torch.Tensor) -> torch.Tensor:
            if rows.dtype != of.weight.dtype:  # transformers' result is of the wider type
                return cast("torch.Tensor", plain(rows))
            return cast("torch.Tensor", cast("Any", _Norm).apply(rows, of.weight, getattr(of, name)))

        return normed

    return made


def _gated(module: torch.nn.Module) -> Callable[[Any], Rows] | None:
    """down(silu(gate) up), made for a module; None where it has other parts."""
    if {name for name, _ in module.named_children()} != GATED:
        return None

    def made(of: Any) -> Rows:
        plain, activation = of.forward, of.act_fn

        def gated(rows: torch.Tensor) -> torch.Tensor:
            if of.act_fn is not activation:  # somebody has put another in its place since
                return cast("torch.Tensor", plain(rows))
            return feed_forward(of, (ligers() if rows.is_cuda else None) or Gated, rows)

        return gated

    return made


def feed_forward(module: Any, function: Any, rows: torch.Tensor) -> torch.Tensor:
    """A gated layer, whose activation is `Gated` or another function in its place."""
    return cast("torch.Tensor", module.down_proj(function.apply(module.gate_proj(rows), module.up_proj(rows))))


def _agree(module: torch.nn.Module, forward: Callable[[Any], Rows]) -> bool:
    """Whether a module computes the same, asked in float32; of small rows, too, where a norm's epsilon counts."""
    if len(inspect.signature(module.forward).parameters) != 1:
        return False
    single = all(one.dtype == torch.float32 for one in module.parameters())
    alike: Any = module if single else copy.deepcopy(module).float()
    weight = next(alike.parameters())
    rows = torch.randn(4, weight.shape[-1], generator=torch.Generator().manual_seed(0)).to(weight.device)
    with torch.no_grad():
        pairs = [(alike(scale * rows), forward(alike)(scale * rows)) for scale in (1e-3, 1.0, 30.0)]
    return all(bool((one - other).abs().max() <= 1e-5 * one.abs().max()) for one, other in pairs)


class _Norm(torch.autograd.Function):
    """x / sqrt(mean x^2 + eps) weight, rounded once (arXiv:1910.07467)."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        normed: torch.Tensor
        normed, inverse = torch.ops.aten._fused_rms_norm(rows, weight.shape, weight, eps)
        ctx.save_for_backward(rows, inverse, weight)
        return normed

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        (rows, inverse, weight), (gradient,), wanted = ctx.saved_tensors, gradients, ctx.needs_input_grad[:2]
        if rows.is_cuda:
            return *torch.ops.aten._fused_rms_norm_backward(gradient, rows, weight.shape, inverse, weight, wanted), None
        normed, flowing = rows.float() * inverse.float(), gradient.float()
        of_weight = (flowing * normed).flatten(0, -2).sum(0).to(weight.dtype) if wanted[1] else None
        flowing = flowing * weight.float()
        of_rows = (flowing - normed * (flowing * normed).mean(-1, keepdim=True)) * inverse.float()
        return of_rows.to(rows.dtype), of_weight, None


@functools.cache
def ligers() -> Any:
    """silu(gate) up by kernels of liger-kernel, one forward and one back; None where it is not installed.

    The backward pass writes gradients over gate and up, which nothing but it keeps.
    """
    if find_spec("liger_kernel") is None:
        return None
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction


class Gated(torch.autograd.Function):
    """silu(gate) up, of which the first factor is made again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (gate, up), (gradient,) = ctx.saved_tensors, gradients
        return torch.ops.aten.silu_backward(gradient * up, gate), gradient * F.silu(gate)
