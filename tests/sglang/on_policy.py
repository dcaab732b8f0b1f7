"""Runs in SGLang's Python under Triton's interpreter: attention of one token against all rows at once, and of both
against float64; a rope and products in fewer kernels or other blocks, against what they stand in for.

Prints what it found as JSON; test_on_policy.py says what has to be found.
"""

import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
import numpy as np
import sglang_cpu  # noqa: F401 - stands in for the kernels before SGLang is imported
import torch
import torch.nn.functional as F
import triton.runtime.interpreter as interpreter

sys.path.insert(0, str(Path(__file__).parents[2] / "plugins/miles-sglang/src/miles_sglang/server_extension/on_policy"))
from miles_attention import chunks_of, decode, prefill
from miles_kernels import WIDE, blocks, gated, multiply, turn
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

# A tensor core adds up an element alike, however many rows a block has; BLAS for AVX2 does not, so sums are in float64.
interpreter.np = type("Numpy", (), {**vars(np), "matmul": staticmethod(
    lambda a, b, dtype=np.float32: (a.astype(np.float64) @ b.astype(np.float64)).astype(dtype))})

LENGTHS, HEADS, SHARED, SIZE, SCALE = (1, 65, 530, 17), 4, 2, 24, 0.25
LONG, NEW = 4500, 3
"""Keys of a sequence with chunks of two sizes, and how many of its tokens are new."""


def main():
    torch.manual_seed(0)
    print(json.dumps({"attention": attended(), "long": long(), "rope": turned(), "gated": activated(),
                      "products": multiplied()}))


def drawn(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys, values."""
    q, k, v = (torch.randn(rows, heads, SIZE) for heads in (HEADS, SHARED, SHARED))
    return q, k, v


def prefilled(q, keys, values, starts, offsets, places, prefixes) -> torch.Tensor:
    out = torch.empty_like(q)
    longest = int(starts.diff().max())
    prefill(q, out, keys, values, 1.0, 1.0, starts, offsets, places, prefixes, longest, sm_scale=SCALE)
    return out


def exact(q, k, v) -> torch.Tensor:
    """Of the last len(q) of len(k) tokens, in float64."""
    q, k, v = (one.transpose(0, 1).double() for one in (q, k.repeat_interleave(HEADS // SHARED, 1),
                                                        v.repeat_interleave(HEADS // SHARED, 1)))
    mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=SCALE).transpose(0, 1)


def attended() -> dict[str, float]:
    """Numbers of tokens that decode which are not prefill's, and how far those are from float64."""
    q, k, v = drawn(sum(LENGTHS))
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    packed = prefilled(q, k, v, offsets, offsets, torch.arange(len(q)), torch.zeros_like(offsets[1:]))
    sums = torch.cat([exact(*parts) for parts in zip(*(one.split(LENGTHS) for one in (q, k, v)), strict=True)])
    places = torch.randperm(len(q))  # in a cache tokens lie anywhere
    keys, values = (torch.empty_like(one).index_copy_(0, places, one) for one in (k, v))
    differ = 0
    for row in [*range(0, max(LENGTHS), 31), 255, 256]:
        going = [(start, row) for start, length in zip(offsets.tolist(), LENGTHS, strict=False) if row < length]
        last = torch.tensor([start + row for start, row in going])
        seen = torch.cat([places[start : start + row + 1] for start, row in going])
        counts = torch.tensor([0, *(row + 1 for _, row in going)]).cumsum(0).int()
        differ += int((decode(q[last], keys, values, counts, seen, 1024, SCALE) != packed[last]).sum())
    return {"differ": differ, "from_exact": float((packed - sums).abs().max())}


def long() -> dict[str, float]:
    """The same of a sequence whose first tokens are in the cache already; `chunks` are those of its keys."""
    q, k, v = drawn(LONG)
    places, ends = torch.arange(LONG), torch.tensor([0, LONG], dtype=torch.int32)
    new = prefilled(q[-NEW:], k, v, torch.tensor([0, NEW], dtype=torch.int32), ends, places,
                    torch.tensor([LONG - NEW], dtype=torch.int32))
    one = decode(q[-1:], k, v, ends, places, LONG, SCALE)
    return {"differ": int((one != new[-1:]).sum()), "from_exact": float((new - exact(q[-NEW:], k, v)).abs().max()),
            "chunks": chunks_of(LONG)}


def turned() -> dict[str, float]:
    """Numbers of a rope in float16 that are not transformers', which rounds each product and each sum; and how far the
    rotation back of a gradient is from what autograd makes of the rope."""
    q, k, cos, sin = (torch.randn(1, 5, *heads, 16).half() for heads in ((HEADS - 1,), (SHARED,), (), ()))
    q, k, cos, sin = q.transpose(1, 2), k.transpose(1, 2), cos[..., :8].repeat(1, 1, 2), sin[..., :8].repeat(1, 1, 2)
    pairs = zip(turn(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin), strict=True)
    differ = sum(int((ours != theirs).sum()) for ours, theirs in pairs)
    leaves = [one.float().requires_grad_() for one in (q, k)]
    gradients = torch.autograd.grad(apply_rotary_pos_emb(*leaves, cos.float(), sin.float()), leaves, (q, k))
    back = turn(q, k, cos, -sin)
    away = max(float((one - other).abs().max()) for one, other in zip(back, gradients, strict=True))
    return {"differ": differ, "gradient": away}


def activated() -> float:
    """How far a gated activation in float32 is from float64, relative to its largest number."""
    gate, up = torch.randn(2, 3, 700) * 5
    exact = F.silu(gate.double()) * up.double()
    return float((gated(gate, up) - exact).abs().max() / exact.abs().max())


def multiplied() -> dict[str, int]:
    """Numbers of products of few integers, which every order adds up alike, that are wrong; by blocks."""
    a, b, bias = (torch.randint(-4, 5, shape).float() for shape in ((70, 40), (50, 40), (50,)))
    exact = a @ b.t() + bias
    sizes = {blocks(1, 1024), blocks(1, 151936), WIDE}
    return {str(each): int((multiply(a, b.t(), bias, each, processors=7) != exact).sum()) for each in sizes}


main()
