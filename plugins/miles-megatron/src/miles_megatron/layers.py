"""Layer-spec parts that need neither Transformer Engine nor CUDA: norms and the activations of MLPs.

They are written for few passes over memory, which is what a small model's step costs on a CPU: the elementwise parts
are autograd functions that save their inputs and nothing else.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from miles_megatron import cpu

cpu.install()

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add  # noqa: E402 - after install()
from megatron.core.transformer.module import MegatronModule  # noqa: E402

_BLOCK = 512
"""Rows of one block where a function works blockwise."""


class _RMSNorm(torch.autograd.Function):
    """x [..., H], weight [H] -> x / rms(x) * (weight + centre), statistics in fp32.

    Without a centre the normed x is rounded to its dtype before it is scaled, as in Hugging Face's Qwen3RMSNorm, with
    one after, as in Gemma2RMSNorm.
    """

    @staticmethod
    def forward(ctx, x, weight, eps, centre):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # The engine's steps, and so its bits (miles_local/decode.py).
        scale = (wide * wide).mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        ctx.centre = centre
        if centre:
            return (wide * scale).mul_(weight.to(scale.dtype) + centre).to(x.dtype)
        return (wide * scale).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        grad, normed = grad.to(scale.dtype), x * scale
        product = normed * grad
        grad_weight = product.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        gain = weight.to(product.dtype)
        gain = gain + ctx.centre if ctx.centre else gain
        along = (product @ gain).div_(x.shape[-1]).unsqueeze(-1)
        # d x = (gain * grad - normed * mean(gain * grad * normed)) / rms
        grad_x = torch.mul(grad, gain).addcmul_(normed, along, value=-1).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None, None


class RMSNorm(torch.nn.Module):
    """Root mean square norm over the last axis (Zhang and Sennrich, arXiv:1910.07467).

    Args:
        centre: added to the weight: 1 where the checkpoint keeps weights about 0 (Gemma), else 0.
    """

    def __init__(self, hidden_size: int, eps: float, dtype: torch.dtype, centre: float = 0.0):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((hidden_size,), 1 - centre, dtype=dtype))
        self.eps, self.centre = eps, centre

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _RMSNorm.apply(x, self.weight, self.eps, self.centre)


class Norm:
    """What a layer spec calls for a norm: RMSNorm or LayerNorm, and usable under sequence parallelism.

    Megatron's own WrappedTorchNorm refuses sequence parallelism; the mark on the parameter is all that
    `finalize_model_grads` needs to sum its gradient over the tensor-parallel group.
    """

    def __new__(cls, config, hidden_size: int, eps: float = 1e-5, **_):
        if config.normalization == "RMSNorm":
            centre = 1.0 if config.layernorm_zero_centered_gamma else 0.0
            norm = RMSNorm(hidden_size, eps, config.params_dtype, centre)
        else:
            norm = torch.nn.LayerNorm(hidden_size, eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class NormThenAdd(torch.nn.Module):
    """In the place of a layer's bias-dropout-add: the sublayer's output passes a norm, then joins the residual.

    So "sandwich norms" (Gemma 2, arXiv:2408.00118; GLM-4) need no layer of their own.

    Args:
        norm: called as Norm is.
        scalar: the sum is multiplied with a number, which a checkpoint has and no optimizer sees (Gemma 4).
    """

    def __init__(self, config, norm=Norm, scalar: bool = False):
        super().__init__()
        self.norm = norm(config, config.hidden_size, config.layernorm_epsilon)
        self.register_buffer("scalar", torch.ones(1, dtype=config.params_dtype) if scalar else None)

    def forward(self, training: bool, fused: bool):
        """Megatron's protocol: returns the function that is called with (output, bias), residual, dropout."""
        add = get_bias_dropout_add(training, fused)

        def normed_add(output_with_bias, residual, dropout):
            output, bias = output_with_bias
            total = add((self.norm(output if bias is None else output + bias), None), residual, dropout)
            return total if self.scalar is None else total * self.scalar

        return normed_add


class ScaledAdd(torch.nn.Module):
    """In the place of a layer's bias-dropout-add: the sublayer's output joins the residual times a factor (Granite).

    Args:
        scale: that factor.
    """

    def __init__(self, config, scale: float):
        super().__init__()
        self.scale = scale

    def forward(self, training: bool, fused: bool):
        """As NormThenAdd's."""
        add = get_bias_dropout_add(training, fused)

        def scaled_add(output_with_bias, residual, dropout):
            output, bias = output_with_bias
            return add(((output if bias is None else output + bias) * self.scale, None), residual, dropout)

        return scaled_add


class _SwiGLU(torch.autograd.Function):
    """x [..., 2F] = (gate, up) -> silu(gate) * up, [..., F]."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        out = torch.empty_like(x)
        # On a CPU in blocks: the temporaries stay in cache; whole, each is fresh memory (measured: half the time).
        rows = max(1, len(x)) if x.is_cuda else _BLOCK
        for x_, grad_, out_ in zip(x.split(rows), grad.split(rows), out.split(rows), strict=True):
            (gate, up), (to_gate, to_up) = x_.chunk(2, -1), out_.chunk(2, -1)
            torch.mul(grad_, F.silu(gate), out=to_up)
            torch.ops.aten.silu_backward.grad_input(grad_ * up, gate, grad_input=to_gate)
        return out


class SwiGLU(MegatronModule):
    """The activation of a gated MLP in one pass each way (Shazeer, arXiv:2002.05202)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _SwiGLU.apply(x)


class GeGLU(MegatronModule):
    """A gated MLP's activation with the tanh approximation of GELU (Shazeer, arXiv:2002.05202)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return F.gelu(gate, approximate="tanh") * up


class ClampedSwiGLU(MegatronModule):
    """gpt-oss's activation of a gated MLP: gate x sigmoid(1.702 gate) x (up + offset), both halves clamped before.

    The limit is the config's `activation_func_clamp_value`, of the gate from above and of up on both sides; the offset
    is its `glu_linear_offset`.
    """

    SLOPE = 1.702

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., 2 F] -> [..., F]."""
        gate, up = x.chunk(2, -1)
        limit = self.config.activation_func_clamp_value
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + self.config.glu_linear_offset) * (gate * torch.sigmoid(gate * self.SLOPE))


class ClampedSiLU(ClampedSwiGLU):
    """The same with a plain SiLU (DeepSeek-V4)."""

    SLOPE = 1.0


class SquaredReLU(MegatronModule):
    """The activation of an MLP without a gate: relu(x)^2 (So et al., arXiv:2109.08668)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x).square()
