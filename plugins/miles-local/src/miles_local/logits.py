"""Log-probs and their gradients from logits in one pass each, by Triton kernels: what trainers compute on a GPU.

torch widens a chunk of logits to float32, normalises it, and reads the result again for every further term: some 30
bytes move for each logit that is 2 bytes. Here each is read once forward, in the precision in which the product rounded
it, and read and written once backward, in place. Sums are in float32.

Trainers import it where there are a GPU and Triton, for 16-bit logits that no rank shares; else torch's way is taken,
with the same results to rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 8192
"""Logits that a program holds at a time."""


@triton.jit
def _score(logits, targets, log_probs, normaliser, entropy, width, row_stride, scale, BLOCK: tl.constexpr,
           ENTROPY: tl.constexpr):
    """One row: log p(target), the log of the normaliser, and the entropy, of softmax(scale x logits)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    most, total, weighted = -float("inf"), 0.0, 0.0
    for begin in range(0, width, BLOCK):
        inside = begin + columns < width
        z = tl.load(logits + row * row_stride + begin + columns, mask=inside, other=-float("inf"))
        z = z.to(tl.float32) * scale
        now = tl.maximum(most, tl.max(z, 0))
        shrink = tl.exp(most - now)
        p = tl.exp(z - now)
        if ENTROPY:
            # Sums of p (z - now): what was summed about the old maximum moves with it.
            moved = tl.where(total > 0, (most - now) * total, 0.0)
            weighted = (weighted + moved) * shrink + tl.sum(tl.where(inside, p * (z - now), 0.0), 0)
        total = total * shrink + tl.sum(p, 0)
        most = now
    target = tl.load(logits + row * row_stride + tl.load(targets + row)).to(tl.float32) * scale
    log_total = tl.log(total)
    tl.store(log_probs + row, target - most - log_total)
    tl.store(normaliser + row, most + log_total)
    if ENTROPY:
        tl.store(entropy + row, log_total - weighted / total)


@triton.jit
def _differentiate(logits, targets, normaliser, entropy, grad, grad_entropy, width, row_stride, scale,
                   BLOCK: tl.constexpr, ENTROPY: tl.constexpr):
    """A block of one row, in place: the gradient of its logits (miles_megatron/logprob.py, _logits_gradient)."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    where = logits + row * row_stride + columns
    log_p = tl.load(where, mask=inside, other=0.0).to(tl.float32) * scale - tl.load(normaliser + row)
    g = tl.load(grad + row)
    factor = g
    if ENTROPY:
        factor += tl.load(grad_entropy + row) * (log_p + tl.load(entropy + row))
    d = tl.where(columns == tl.load(targets + row), g, 0.0) - tl.exp(log_p) * factor
    tl.store(where, (d * scale).to(logits.dtype.element_ty), mask=inside)


def score(logits: torch.Tensor, targets: torch.Tensor, temperature: float,
          want_entropy: bool) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Of each row: log p(target), the entropy or None, and the log of the normaliser.

    Args:
        logits: [n, V] as the product rounded them, not divided by the temperature.
        targets: [n] int64.

    Returns:
        Three times [n] float32.
    """
    log_probs, normaliser = logits.new_empty(2, len(logits), dtype=torch.float32)
    entropy = torch.empty_like(log_probs) if want_entropy else None
    if len(logits):
        _score[(len(logits),)](logits, targets, log_probs, normaliser, entropy if want_entropy else log_probs,
                               logits.shape[1], logits.stride(0), 1 / temperature, BLOCK=BLOCK, ENTROPY=want_entropy,
                               num_warps=16)
    return log_probs, entropy, normaliser


def differentiate(logits: torch.Tensor, targets: torch.Tensor, normaliser: torch.Tensor, entropy: torch.Tensor | None,
                  grad: torch.Tensor, grad_entropy: torch.Tensor | None, temperature: float) -> torch.Tensor:
    """The gradient of the logits [n, V], written over them, from those of the log-probs [n] and of the entropy [n]."""
    if len(logits):
        with_entropy = grad_entropy is not None
        _differentiate[(len(logits), triton.cdiv(logits.shape[1], BLOCK))](
            logits, targets, normaliser, entropy if with_entropy else normaliser, grad.contiguous(),
            grad_entropy.contiguous() if with_entropy else grad, logits.shape[1], logits.stride(0), 1 / temperature,
            BLOCK=BLOCK, ENTROPY=with_entropy, num_warps=16,
        )  # fmt: skip
    return logits
