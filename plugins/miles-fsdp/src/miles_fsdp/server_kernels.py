"""What --true-on-policy-mode computes with: the kernels by which SGLang's servers run the same module of transformers.

Products, means and log_softmax are those of SGLang's deterministic mode, which do not depend on what else is in a
batch; attention, ropes and gated activations are what the plugin sglang has its servers compute in this mode. Gradients
of attention are those of torch's flash attention.
"""

from __future__ import annotations

import functools
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

import torch
import torch.nn.functional as F

from miles_core.errors import ConfigError
from miles_fsdp.attention import Boundaries, flash
from miles_fsdp.lean import GATED, Gated, feed_forward
from miles_fsdp.on_policy import KINDS


def begin(device: torch.device) -> None:
    """Have this process compute by SGLang's kernels from now on.

    Raises:
        ConfigError: there is no GPU, or no SGLang in this Python.
    """
    if device.type != "cuda" or find_spec("sglang") is None:
        raise ConfigError("true_on_policy_mode with the trainer fsdp computes by SGLang's kernels",
                          got=f"a trainer on {device.type}, SGLang {'' if find_spec('sglang') else 'not '}installed",
                          who="--trainer fsdp", code="fsdp-true-on-policy-kernels",
                          fix="GPUs, and SGLang in the trainer's Python; on CPUs leave --trainer and --engine out")
    from miles_sglang.server_extension.on_policy.miles_kernels import product, rope
    from sglang.srt.batch_invariant_ops import batch_invariant_ops

    batch_invariant_ops.enable_batch_invariant_mode(enable_bmm=False)  # as miles_on_policy.py, which says why
    theirs: Any = batch_invariant_ops
    theirs._matmul_persistent_triton = functools.partial(product, theirs._matmul_persistent_triton)
    for kind in KINDS:
        module: Any = import_module(f"transformers.models.{kind}.modeling_{kind}")
        module.apply_rotary_pos_emb = functools.partial(rope, cast("Any", Rope).apply, module.apply_rotary_pos_emb)


def prepare(model: torch.nn.Module, device: torch.device) -> None:
    """Have a model on this device compute as a server's does, after `begin`."""
    tables(model, device)
    products(model)
    activations(model)


def tables(model: torch.nn.Module, device: torch.device) -> None:
    """Have a rope's frequencies computed on the device, as a server's are: powers may differ from a CPU's in a bit."""
    for module in model.modules():
        if "inv_freq" in module._buffers:
            with device:
                fresh = type(module)(cast("Any", module).config)
            for name, frequencies in fresh.named_buffers(recurse=False):
                module._buffers[name] = frequencies


class Product(torch.autograd.Function):
    """A linear layer by whatever computes products here; gradients by cuBLAS, which the servers' products stand in for.

    Rows of other samples may change a gradient's bits, as they do in every trainer: the policy that servers sample from
    is the one that a step starts with.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """[..., in], [out, in], [out] -> [..., out]."""
        ctx.save_for_backward(rows, weight)
        return F.linear(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (rows, weight), (for_rows, for_weight, for_bias) = ctx.saved_tensors, ctx.needs_input_grad
        flowing, inputs = gradients[0].flatten(0, -2), rows.flatten(0, -2)
        return (_by_cublas(flowing, weight).view_as(rows) if for_rows else None,
                _by_cublas(flowing.t(), inputs) if for_weight else None, flowing.sum(0) if for_bias else None)


def _by_cublas(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """[m, k] @ [k, n] as a batch of one: `begin` leaves bmm alone, and puts Triton's kernels in the place of mm."""
    return torch.bmm(one[None], other[None])[0]


def products(model: torch.nn.Module) -> None:
    """Have the gradients of a model's linear layers computed by cuBLAS, which takes half the time."""
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            cast("Any", module).forward = functools.partial(_linear, module)


def _linear(module: torch.nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    return cast("torch.Tensor", cast("Any", Product).apply(rows, module.weight, module.bias))


class Rope(torch.autograd.Function):
    """A rotary embedding in one kernel. Its gradient is the rotation back."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        """See miles_kernels.turn."""
        from miles_sglang.server_extension.on_policy.miles_kernels import turn

        ctx.save_for_backward(cos, sin)
        return turn(q, k, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from miles_sglang.server_extension.on_policy.miles_kernels import turn

        (cos, sin), (for_q, for_k) = ctx.saved_tensors, gradients
        return *turn(for_q, for_k, cos, -sin), None, None


class Activation(Gated):
    """silu(gate) up, on a GPU in one kernel."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if not gate.is_cuda:
            return Gated.forward(ctx, gate, up)
        from miles_sglang.server_extension.on_policy.miles_kernels import gated

        ctx.save_for_backward(gate, up)
        return gated(gate, up)


def activations(model: torch.nn.Module) -> None:
    """Have a model's gated layers computed with their activation in one kernel."""
    for module in model.modules():
        if {name for name, _ in module.named_children()} == GATED and cast("Any", module).config.hidden_act == "silu":
            cast("Any", module).forward = functools.partial(feed_forward, module, Activation)


class PrefillAttention(torch.autograd.Function):
    """The servers' attention, of packed samples; the backward pass is that of torch's flash attention."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: Boundaries,
                scale: float) -> torch.Tensor:
        """[T, heads, D], [T, heads for keys, D], [T, heads for keys, E] -> [T, heads, E]."""
        from miles_sglang.server_extension.on_policy.miles_attention import prefill

        ctx.save_for_backward(query, key, value)
        ctx.offsets, ctx.lengths, ctx.scale = bounds.offsets, bounds.lengths, scale
        offsets = cast("torch.Tensor", bounds.offsets)
        attended = query.new_empty(*query.shape[:2], value.shape[-1])
        places = torch.arange(len(key), device=key.device)
        prefill(query, attended, key, value, 1.0, 1.0, offsets, offsets, places, torch.zeros_like(offsets[1:]),
                max(bounds.lengths), scale)
        return attended

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        bounds = Boundaries(ctx.lengths, ctx.offsets)
        with torch.enable_grad():
            query, key, value = inputs = [one.detach().requires_grad_() for one in ctx.saved_tensors]
            attended = flash(query, key, value, bounds, ctx.scale, None)
        return *torch.autograd.grad(attended, inputs, gradients), None, None


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: Boundaries, scale: float,
           _window: int | None) -> torch.Tensor:
    """For Boundaries.attend."""
    return cast("torch.Tensor", cast("Any", PrefillAttention).apply(query, key, value, bounds, scale))
