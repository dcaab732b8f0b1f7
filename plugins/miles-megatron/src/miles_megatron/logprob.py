"""Log-probabilities and entropy of tokens from hidden states, in chunks: the logits of a batch never exist.

Backward makes each chunk's logits again. Peak memory is 8 bytes x chunk x V (12 under tensor parallelism) beside the
inputs and the gradients, of which the weight's is summed up in fp32. The softmax is
in fp32 for bf16 inputs and in float64 for float64 ones; bf16 logits are rounded to bf16 first, as Hugging Face and the
engines do.

Under tensor parallelism a rank holds the rows V r / t .. V (r+1) / t of the output layer. Maximum, normaliser, the
target's logit and the entropy's sum are then reduced over the group, two small reductions a chunk; backward needs none,
since the normaliser is kept. The gradient of `hidden` is each rank's share: who gathers or copies it to the group sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType

import torch
import torch.distributed as dist
import torch.nn.functional as F

from miles_megatron.packed_layout import ROWS

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
    group: dist.ProcessGroup | None = None,
    softcap: float | None = None,
    rounded: bool = True,
    gradients: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log p(target) and the entropy of p = softmax(hidden weight^T / temperature), untruncated.

    Args:
        hidden: [N, H], only the rows that are needed; weight: [V, H]; targets: [N] int64.
        temperature: of the distribution; the same as the engine samples from.
        chunk_size: rows whose logits exist at a time, all if below 1; by default what CHUNK_BYTES hold.
        entropy: whether to compute it.
        entropy_gradient: whether it has a gradient; without one it costs nothing in backward.
        group: tensor-parallel ranks among which the rows of `weight` are cut, [V / t, H] each.
        softcap: logits are softcap x tanh(hidden weight^T / softcap), as in Gemma 2 (arXiv:2408.00118); by default not.
        rounded: bf16 logits are rounded to bf16, as in Hugging Face; else they keep the product's fp32.
        gradients: [V, H] what kernels of a GPU may add the weight's gradient to, in place of returning it.

    Returns:
        log_probs [N] and entropy [N] or None, in fp32 (float64 for float64 inputs).

    Raises:
        ValueError: a temperature that is not positive.
    """
    hidden, chunk_size, group = _prepared(hidden, weight, temperature, chunk_size, group)
    if group is None and softcap is None and rounded and (kernels := _kernels(hidden)) is not None:
        log_probs, spread = kernels.FusedLogProbs.apply(hidden, weight, targets, float(temperature), chunk_size,
                                                        entropy or entropy_gradient, entropy_gradient, gradients)
        return log_probs, spread if entropy or entropy_gradient else None
    log_probs, spread = _TokenLogProbs.apply(
        hidden, weight, targets, (float(temperature), softcap, rounded), chunk_size, entropy or entropy_gradient,
        entropy_gradient, group,
    )  # fmt: skip
    return log_probs, spread if entropy or entropy_gradient else None


@torch.no_grad()
def log_probs_at(
    hidden, weight, tokens, *, temperature=1.0, chunk_size=None, group=None, softcap=None, rounded=True
) -> torch.Tensor:
    """log p of K tokens a row: tokens [N, K] int64 -> [N, K], without gradient; otherwise as `token_log_probs`."""
    hidden, chunk_size, group = _prepared(hidden, weight, temperature, chunk_size, group)
    log_probs = hidden.new_empty(tokens.shape, dtype=_wide(hidden))
    for here, log_p in _normalised(hidden, weight, (temperature, softcap, rounded), chunk_size, group):
        log_probs[here] = _pick(log_p, tokens[here], group)
        if group is not None:
            dist.all_reduce(log_probs[here], group=group)
    return log_probs


@torch.no_grad()
def top_log_probs(hidden, weight, k, *, temperature=1.0, chunk_size=None, group=None, softcap=None, rounded=True):
    """The k likeliest tokens of each row, [N, k] int64, and their log-probs [N, k], likeliest first; no gradient."""
    hidden, chunk_size, group = _prepared(hidden, weight, temperature, chunk_size, group)
    tokens = torch.empty(hidden.shape[0], k, dtype=torch.int64, device=hidden.device)
    values = hidden.new_empty(tokens.shape, dtype=_wide(hidden))
    for here, log_p in _normalised(hidden, weight, (temperature, softcap, rounded), chunk_size, group):
        best, where = log_p.topk(min(k, log_p.shape[1]), 1)
        if group is not None:
            where += group.rank() * weight.shape[0]
            best, where = (_side_by_side(part, group) for part in (best, where))
            best, order = best.topk(k, 1)
            where = where.gather(1, order)
        values[here], tokens[here] = best, where
    return tokens, values


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, shape, chunk_size, want_entropy, entropy_gradient, group):
        log_probs = hidden.new_empty(hidden.shape[0], dtype=_wide(hidden))
        entropy = torch.empty_like(log_probs) if want_entropy else log_probs.new_empty(0)
        normaliser = torch.empty_like(log_probs) if group is not None else log_probs.new_empty(0)
        for begin in range(0, hidden.shape[0], chunk_size):
            here = slice(begin, begin + chunk_size)
            scored = _scored_chunk(hidden[here], weight, targets[here], shape, want_entropy, group)
            log_probs[here] = scored[0]
            if want_entropy:
                entropy[here] = scored[1]
            if group is not None:
                normaliser[here] = scored[2]
        ctx.save_for_backward(hidden, weight, targets, entropy, normaliser)
        ctx.shape, ctx.chunk_size, ctx.entropy_gradient, ctx.group = shape, chunk_size, entropy_gradient, group
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx, grad, grad_entropy):
        hidden, weight, targets, entropy, normaliser = ctx.saved_tensors
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        # A bf16 sum over thousands of chunks would lose what each adds.
        grad_weight = torch.zeros_like(weight, dtype=_wide(hidden)) if want_weight else None
        for begin in range(0, hidden.shape[0], ctx.chunk_size):
            here = slice(begin, begin + ctx.chunk_size)
            gradients = grad[here], grad_entropy[here] if ctx.entropy_gradient else None
            saved = targets[here], entropy[here] if ctx.entropy_gradient else None, normaliser[here]
            d = _logits_gradient(hidden[here], weight, *saved, *gradients, ctx.shape, ctx.group)
            if want_hidden:
                torch.mm(d, weight, out=grad_hidden[here])
            if want_weight and hidden.dtype == d.dtype == grad_weight.dtype:
                grad_weight.addmm_(d.t(), hidden[here])
            elif want_weight:
                grad_weight.add_(d.t() @ hidden[here])
            del d  # before the next chunk's logits are there
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), *(None,) * 6


def _scored_chunk(hidden, weight, targets, shape, want_entropy, group):
    """[n, H] -> log p(target) [n], the entropy if wanted, the log of the normaliser under tensor parallelism."""
    logits = _logits(hidden, weight, *shape)
    if group is not None:
        (log_probs, entropy), normaliser = _reduced(logits, targets, group)
        return log_probs, entropy, normaliser
    log_p = torch.log_softmax(logits, 1)
    del logits
    log_probs = log_p.gather(1, targets[:, None])[:, 0]
    return log_probs, torch.linalg.vecdot(log_p.exp(), log_p).neg_() if want_entropy else None, None


def _logits_gradient(hidden, weight, targets, entropy, normaliser, grad, grad_entropy, shape, group):
    """[n, V] in the dtype of `hidden`: of the plain logits, from those of the log-probs and of the entropy."""
    temperature, softcap, _ = shape
    log_p = _logits(hidden, weight, *shape)
    # With z the plain logit, d (c tanh(z / c)) / d z = 1 - tanh(z / c)^2.
    slope = None if softcap is None else (log_p * (temperature / softcap)).square_().neg_().add_(1)
    log_p = torch.log_softmax(log_p, 1) if group is None else log_p.sub_(normaliser[:, None])
    if grad_entropy is not None:
        # d log p_t / d z = 1_t - p and d entropy / d z = -p (log p + entropy), so with g and e for the two
        # gradients the sum is g 1_t - p (g + e (log p + entropy)).
        e = grad_entropy[:, None]
        factor = torch.addcmul(torch.addcmul(grad[:, None], e, entropy[:, None]), e, log_p)
        d = log_p.exp_().mul_(factor).neg_()
    else:
        d = log_p.exp_().mul_(-grad[:, None])
    where, mine = _local(targets[:, None], d.shape[1], group)
    d.scatter_add_(1, where, grad[:, None] * mine)
    if temperature != 1:
        d.div_(temperature)
    if slope is not None:
        d.mul_(slope)
    return d.to(hidden.dtype)


def _prepared(hidden, weight, temperature, chunk_size, group):
    if not temperature > 0:
        raise ValueError(f"temperature must be positive (got {temperature})")
    # Megatron's Float16Module hands out fp32 copies of bf16 activations; this is lossless then.
    hidden = hidden.to(weight.dtype)
    if chunk_size is None:
        chunk_size = max(16, CHUNK_BYTES // (weight.shape[0] * _wide(hidden).itemsize))
    elif chunk_size < 1:
        chunk_size = max(1, len(hidden))
    return hidden, chunk_size, group if group is not None and group.size() > 1 else None


def _kernels(hidden: torch.Tensor) -> ModuleType | None:
    """fused_logits, where it computes these."""
    if not hidden.is_cuda or hidden.dtype not in (torch.bfloat16, torch.float16) or find_spec("triton") is None:
        return None
    from miles_megatron import fused_logits

    return fused_logits


def _wide(hidden: torch.Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _logits(
    hidden: torch.Tensor, weight: torch.Tensor, temperature: float, softcap: float | None, rounded: bool
) -> torch.Tensor:
    """[n, H], [V, H] -> [n, V] logits of the temperature-scaled distribution, in the wide dtype.

    Whole rows of kernels and the same function as the local engine's: in float32 the bits are the engine's too.
    """
    rows = hidden.shape[0]
    if rows % ROWS:
        hidden = F.pad(hidden, (0, 0, 0, -rows % ROWS))
    logits = F.linear(hidden, weight).to(_wide(hidden)) if rounded else _unrounded(hidden, weight)
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    if temperature != 1:
        logits.div_(temperature)
    return logits[:rows]


def _unrounded(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product in the wide dtype; a GPU's kernels sum up in it anyway."""
    if hidden.is_cuda and hidden.dtype != _wide(hidden):
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return F.linear(hidden.to(_wide(hidden)), weight.to(_wide(hidden)))


def _normalised(hidden, weight, shape, chunk_size, group) -> Iterator[tuple[slice, torch.Tensor]]:
    """Chunk by chunk: its rows, and [n, V] (under tensor parallelism [n, V / t]) log-probs."""
    for begin in range(0, hidden.shape[0], chunk_size):
        here = slice(begin, begin + chunk_size)
        logits = _logits(hidden[here], weight, *shape)
        if group is None:
            yield here, torch.log_softmax(logits, 1)
        else:
            targets = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
            yield here, logits - _reduced(logits, targets, group)[1][:, None]


def _reduced(logits: torch.Tensor, targets: torch.Tensor, group: dist.ProcessGroup):
    """[n, V / t] of each rank -> ([2, n]: log p(target) and entropy, [n] log of the normaliser)."""
    most = logits.amax(1)
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    shifted = logits - most[:, None]
    weights = shifted.exp()
    sums = torch.stack([weights.sum(1), _pick(shifted, targets[:, None], group)[:, 0],
                        torch.linalg.vecdot(weights, shifted)])
    dist.all_reduce(sums, group=group)
    total, target, weighted = sums
    log_total = total.log()
    return torch.stack([target - log_total, log_total - weighted / total]), most + log_total


def _local(tokens: torch.Tensor, width: int, group: dist.ProcessGroup | None):
    """Columns of this rank's part of the vocabulary, and whether the token is in it."""
    if group is None:
        return tokens, 1
    where = tokens - group.rank() * width
    mine = (where >= 0) & (where < width)
    return where.where(mine, 0), mine


def _pick(values: torch.Tensor, tokens: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """values [n, V / t], tokens [n, K] -> [n, K], 0 where another rank has the token."""
    where, mine = _local(tokens, values.shape[1], group)
    return values.gather(1, where) * mine


def _side_by_side(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[n, k] of each rank -> [n, t k]."""
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, 1)
