"""What --true-on-policy-mode computes with: the kernels by which SGLang's servers run the same module of transformers.

They are SGLang's own: products, means and log_softmax of its deterministic mode, which do not depend on what else is in
a batch, and the attention of its prefill, by which its servers decode as well in this mode. Gradients of attention are
those of torch's flash attention.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, cast

import torch

from miles_core.errors import ConfigError
from miles_fsdp.attention import Boundaries, flash


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
    from sglang.srt.batch_invariant_ops import enable_batch_invariant_mode

    enable_batch_invariant_mode(enable_bmm=False)  # as miles_on_policy.py in the servers, which says why


def tables(model: torch.nn.Module, device: torch.device) -> None:
    """Have a rope's frequencies computed on the device, as a server's are: powers may differ from a CPU's in a bit."""
    for module in model.modules():
        if "inv_freq" in module._buffers:
            with device:
                fresh = type(module)(cast("Any", module).config)
            for name, frequencies in fresh.named_buffers(recurse=False):
                module._buffers[name] = frequencies


class PrefillAttention(torch.autograd.Function):
    """SGLang's attention of packed samples; the backward pass is that of torch's flash attention."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: Boundaries,
                scale: float) -> torch.Tensor:
        """[T, heads, D], [T, heads for keys, D], [T, heads for keys, E] -> [T, heads, E]."""
        from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd_unified

        ctx.save_for_backward(query, key, value)
        ctx.offsets, ctx.lengths, ctx.scale = bounds.offsets, bounds.lengths, scale
        offsets = cast("torch.Tensor", bounds.offsets)
        attended = query.new_empty(*query.shape[:2], value.shape[-1])
        places = torch.arange(len(key), device=key.device)
        extend_attention_fwd_unified(query, attended, key, value, 1.0, 1.0, offsets, offsets, places,
                                     torch.zeros_like(offsets[1:]), max(bounds.lengths), sm_scale=scale)
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
