"""Log-probabilities and entropy of tokens from hidden states, in chunks: the logits of a batch never exist.

Backward makes each chunk's logits again. Peak memory is chunk x V beside the inputs and the gradients. The softmax is
in fp32 for bf16 inputs and in float64 for float64 ones; bf16 logits are rounded to bf16 first, as Hugging Face and the
engines do.

For tensor parallelism the vocabulary is cut by rank: maximum, normaliser, sum of p x logit and the target's logit of
each row then want an all-reduce over the group each, in place of `_log_softmax`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from miles_core.backends.megatron.layers import ROWS

CHUNK_BYTES = 16 * 2**20
"""Logits of one chunk take about this much by default: near the cache, and wide enough for the GEMM."""


def token_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    entropy: bool = False,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log p(target) and the entropy of p = softmax(hidden weight^T / temperature), untruncated.

    Args:
        hidden: [N, H], only the rows that are needed; weight: [V, H]; targets: [N] int64.
        temperature: of the distribution; the same as the engine samples from.
        chunk_size: rows whose logits exist at a time; by default what CHUNK_BYTES hold.
        entropy: whether to compute it.
        entropy_gradient: whether it has a gradient; without one it costs nothing in backward.

    Returns:
        log_probs [N] and entropy [N] or None, in fp32 (float64 for float64 inputs).

    Raises:
        ValueError: a temperature that is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive (got {temperature})")
    # Megatron's Float16Module hands out fp32 copies of bf16 activations; this is lossless then.
    hidden = hidden.to(weight.dtype)
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    chunk_size = chunk_size or max(16, CHUNK_BYTES // (weight.shape[0] * wide.itemsize))
    log_probs, spread = _TokenLogProbs.apply(
        hidden, weight, targets, float(temperature), int(chunk_size), entropy or entropy_gradient, entropy_gradient
    )
    return log_probs, spread if entropy or entropy_gradient else None


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, chunk_size, want_entropy, entropy_gradient):
        log_probs = hidden.new_empty(hidden.shape[0], dtype=_wide(hidden))
        entropy = torch.empty_like(log_probs) if want_entropy else log_probs.new_empty(0)
        for begin in range(0, hidden.shape[0], chunk_size):
            here = slice(begin, begin + chunk_size)
            log_p = _log_softmax(hidden[here], weight, temperature)
            torch.gather(log_p, 1, targets[here, None], out=log_probs[here, None])
            if want_entropy:
                entropy[here] = torch.linalg.vecdot(log_p.exp(), log_p).neg_()
        ctx.save_for_backward(hidden, weight, targets, entropy)
        ctx.temperature, ctx.chunk_size, ctx.entropy_gradient = temperature, chunk_size, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx, grad, grad_entropy):
        hidden, weight, targets, entropy = ctx.saved_tensors
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        # A bf16 sum over thousands of chunks would lose what each adds.
        grad_weight = torch.zeros_like(weight, dtype=_wide(hidden)) if want_weight else None
        for begin in range(0, hidden.shape[0], ctx.chunk_size):
            here = slice(begin, begin + ctx.chunk_size)
            log_p = _log_softmax(hidden[here], weight, ctx.temperature)
            if ctx.entropy_gradient:
                # d log p_t / d z = 1_t - p and d entropy / d z = -p (log p + entropy), so with g and e for the two
                # gradients the sum is g 1_t - p (g + e (log p + entropy)).
                e = grad_entropy[here, None]
                factor = torch.addcmul(torch.addcmul(grad[here, None], e, entropy[here, None]), e, log_p)
                d = log_p.exp_().mul_(factor).neg_()
            else:
                d = log_p.exp_().mul_(-grad[here, None])
            d.scatter_add_(1, targets[here, None], grad[here, None])
            if ctx.temperature != 1:
                d.div_(ctx.temperature)
            d = d.to(hidden.dtype)
            if want_hidden:
                torch.mm(d, weight, out=grad_hidden[here])
            if want_weight and hidden.dtype == d.dtype == grad_weight.dtype:
                grad_weight.addmm_(d.t(), hidden[here])
            elif want_weight:
                grad_weight.add_(d.t() @ hidden[here])
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), *(None,) * 5


def _wide(hidden: torch.Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _log_softmax(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    """[n, H], [V, H] -> [n, V] log-probs of the temperature-scaled distribution, in the wide dtype.

    Whole rows of kernels and the same function as the local engine's: in float32 the bits are the engine's too.
    """
    rows = hidden.shape[0]
    if rows % ROWS:
        hidden = F.pad(hidden, (0, 0, 0, -rows % ROWS))
    logits = F.linear(hidden, weight).to(_wide(hidden))
    if temperature != 1:
        logits.div_(temperature)
    return torch.log_softmax(logits, 1)[:rows]
