"""logprob.py on a GPU: the head's product and miles_local's kernels, chunk by chunk."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from miles_local.logits import differentiate, score

from miles_megatron import cpu


class FusedLogProbs(torch.autograd.Function):
    """(log-probs [N], entropy [N] or [0]) of the targets; see logprob.token_log_probs."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, chunk_size, want_entropy, entropy_gradient, gradients):
        log_probs, normaliser, entropy = hidden.new_empty(3, len(hidden), dtype=torch.float32)
        for begin in range(0, len(hidden), chunk_size):
            here = slice(begin, begin + chunk_size)
            logits = F.linear(hidden[here], weight)
            log_probs[here], spread, normaliser[here] = score(logits, targets[here], temperature, want_entropy)
            if want_entropy:
                entropy[here] = spread
        ctx.save_for_backward(hidden, weight, targets, normaliser, entropy)
        ctx.temperature, ctx.chunk_size, ctx.entropy_gradient = temperature, chunk_size, entropy_gradient
        ctx.gradients = gradients
        entropy = entropy if want_entropy else entropy[:0]
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx, grad, grad_entropy):
        hidden, weight, targets, normaliser, entropy = ctx.saved_tensors
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        own = want_weight and ctx.gradients is None
        # A 16-bit sum over many chunks would lose what each adds.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if own else ctx.gradients
        for begin in range(0, len(hidden), ctx.chunk_size):
            here = slice(begin, begin + ctx.chunk_size)
            logits = F.linear(hidden[here], weight)
            of_entropy = grad_entropy[here] if ctx.entropy_gradient else None
            d = differentiate(logits, targets[here], normaliser[here], entropy[here], grad[here], of_entropy,
                              ctx.temperature)
            if want_hidden:
                torch.mm(d, weight, out=grad_hidden[here])
            if want_weight:
                _add_product(grad_weight, d, hidden[here])
        return grad_hidden, grad_weight.to(weight.dtype) if own else None, *(None,) * 6


def _add_product(total: torch.Tensor, d: torch.Tensor, hidden: torch.Tensor) -> None:
    """total [V, H] += d [n, V]^T hidden [n, H], inside of the product where Transformer Engine has one that adds."""
    if cpu.no_transformer_engine():
        total.add_(d.t() @ hidden)
        return
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    general_gemm(hidden, d, out_dtype=total.dtype, layout="NT", out=total, accumulate=True, grad=True)
