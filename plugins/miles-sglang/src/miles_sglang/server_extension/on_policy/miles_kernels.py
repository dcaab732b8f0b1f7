"""What takes time beside attention, in fewer kernels or other blocks: products, a rope, a gated activation.

Products have the bits of SGLang's kernel, and a rope those of transformers. Servers and trainers under
--true-on-policy-mode both compute by this file.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

FEW = 64
"""Rows of a product up to which blocks have few columns."""
MANY = 4096
"""Rows from which wide blocks fill a GPU: a trainer's micro-batches, and most of a server's prefill."""
HEAD = 16384
"""Columns from which a product is one with a vocabulary."""
GATED = 1024
"""Numbers of an activation that one program computes."""
WIDE = (128, 256, 64, 8, 3)


def product(original: Any, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[m, k] @ [k, n] (+ [n]) by SGLang's kernel. Blocks only say which elements are computed where: each is added up
    over k in the same order. SGLang's blocks of 128 x 128 would leave most of a GPU idle with the rows of a decode."""
    processors = _processors(a.device) if a.dtype == torch.bfloat16 else 0
    sizes = blocks(len(a), b.shape[1]) if processors else None
    return original(a, b, bias) if sizes is None else multiply(a, b, bias, sizes, processors)


def blocks(rows: int, columns: int) -> tuple[int, int, int, int, int] | None:
    """(rows, columns, depth, warps, stages) of a block; None for SGLang's own."""
    if rows <= FEW:
        return (64, 128, 64, 4, 4) if columns >= HEAD else (64, 32, 128, 4, 4)
    return WIDE if rows >= MANY or columns >= HEAD else None


@functools.lru_cache
def _processors(device: torch.device) -> int:
    """Of a Hopper, on which the bits were compared; else 0."""
    properties = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count) if properties.major == 9 else 0


def multiply(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, sizes: tuple[int, int, int, int, int],
             processors: int) -> torch.Tensor:
    """SGLang's kernel with blocks of these sizes (see `blocks`), of which a GPU's processors take turns."""
    from sglang.srt.batch_invariant_ops import batch_invariant_ops as ops

    (m, k), n, (rows, columns, depth, warps, stages) = a.shape, b.shape[1], sizes
    out, tiles = a.new_empty(m, n), triton.cdiv(m, rows) * triton.cdiv(n, columns)
    ops.matmul_kernel_persistent[(min(processors, tiles),)](
        a, b, out, bias, m, n, k, *a.stride(), *b.stride(), *out.stride(), BLOCK_SIZE_M=rows, BLOCK_SIZE_N=columns,
        BLOCK_SIZE_K=depth, GROUP_SIZE_M=8, NUM_SMS=processors, A_LARGE=a.numel() > 2**31, B_LARGE=b.numel() > 2**31,
        C_LARGE=out.numel() > 2**31, HAS_BIAS=bias is not None, num_stages=stages, num_warps=warps)
    return out


def rope(rotate: Any, original: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
         *rest: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' apply_rotary_pos_emb, by `rotate` where it can: `turn`, or what has a gradient, too.

    It can with bfloat16 of one packed batch on a GPU, and whole heads whose size is a power of two.
    """
    alike, size = all(one.dtype == torch.bfloat16 and one.is_cuda for one in (q, k, cos, sin)), q.shape[-1]
    if rest or more or not alike or len(q) != 1 or size != cos.shape[-1] or size & (size - 1):
        return original(q, k, cos, sin, *rest, **more)
    return rotate(q, k, cos, sin)


def turn(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x cos + rotate_half(x) sin, each operation rounded: q, k of [1, heads, T, D], cos and sin of [1, T, D]."""
    q, k, cos, sin = (one[0] if one.stride(-1) == 1 else one[0].contiguous() for one in (q, k, cos, sin))
    length, size = cos.shape
    turned = [x.new_empty(1, length, len(x), size) for x in (q, k)]
    _turn[(length,)](q, k, cos, sin, *turned, *q.stride()[:2], *k.stride()[:2], cos.stride(0), sin.stride(0),
                     Q_HEADS=len(q), K_HEADS=len(k), HALF=size // 2, Q_BLOCK=triton.next_power_of_2(len(q)),
                     K_BLOCK=triton.next_power_of_2(len(k)), num_warps=4,
                     enable_fp_fusion=False)  # a fused product would not be rounded
    return turned[0].transpose(1, 2), turned[1].transpose(1, 2)


@triton.jit
def _turn(q, k, cos, sin, q_out, k_out, q_head, q_row, k_head, k_row, cos_row, sin_row, Q_HEADS: tl.constexpr,
          K_HEADS: tl.constexpr, HALF: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr):
    """All heads of one row."""
    row = tl.program_id(0).to(tl.int64)
    cos, sin = cos + row * cos_row, sin + row * sin_row
    _turn_heads(q + row * q_row, q_out + row * Q_HEADS * HALF * 2, cos, sin, q_head, Q_HEADS, HALF, Q_BLOCK)
    _turn_heads(k + row * k_row, k_out + row * K_HEADS * HALF * 2, cos, sin, k_head, K_HEADS, HALF, K_BLOCK)


@triton.jit
def _turn_heads(x, out, cos, sin, x_head, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """What is a rounded number in transformers is one here: products, then their sum."""
    head, low = tl.arange(0, BLOCK)[:, None], tl.arange(0, HALF)[None]
    kind = out.dtype.element_ty
    real = head < HEADS
    high = low + HALF
    x_low = tl.load(x + head * x_head + low, mask=real, other=0.0).to(tl.float32)
    x_high = tl.load(x + head * x_head + high, mask=real, other=0.0).to(tl.float32)
    cos_low, cos_high = tl.load(cos + low), tl.load(cos + high)
    sin_low, sin_high = tl.load(sin + low), tl.load(sin + high)
    straight_low, straight_high = (x_low * cos_low).to(kind), (x_high * cos_high).to(kind)
    across_low, across_high = (-x_high * sin_low).to(kind), (x_low * sin_high).to(kind)
    out += head * HALF * 2
    tl.store(out + low, (straight_low.to(tl.float32) + across_low.to(tl.float32)).to(kind), mask=real)
    tl.store(out + high, (straight_high.to(tl.float32) + across_high.to(tl.float32)).to(kind), mask=real)


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) up, both rounded, of tensors of one shape."""
    out = torch.empty_like(gate)
    _gated[(triton.cdiv(out.numel(), GATED),)](gate, up, out, out.numel(), BLOCK=GATED, num_warps=4,
                                               enable_fp_fusion=False)
    return out


@triton.jit
def _gated(gate, up, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    kind = out.dtype.element_ty
    real = at < count
    x = tl.load(gate + at, mask=real, other=0.0).to(tl.float32)
    activated = (x / (1.0 + tl.exp(-x))).to(kind)
    tl.store(out + at, (activated.to(tl.float32) * tl.load(up + at, mask=real, other=0.0).to(tl.float32)).to(kind),
             mask=real)
