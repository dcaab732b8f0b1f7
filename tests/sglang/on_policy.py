"""Runs in SGLang's Python under Triton's interpreter: one token by the kernel of prefill, against all rows at once;
a rope and products in fewer kernels or other blocks, against what they stand in for.

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
from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd_unified

sys.path.insert(0, str(Path(__file__).parents[2] / "plugins/miles-sglang/src/miles_sglang/server_extension/on_policy"))
from miles_on_policy import attend, blocks, multiply, turn
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

# A tensor core adds up an element alike, however many rows a block has; BLAS for AVX2 does not, so sums are in float64.
interpreter.np = type("Numpy", (), {**vars(np), "matmul": staticmethod(
    lambda a, b, dtype=np.float32: (a.astype(np.float64) @ b.astype(np.float64)).astype(dtype))})

LENGTHS, HEADS, SHARED, SIZE, SCALE = (1, 65, 130, 17), 4, 2, 16, 0.25


def main():
    torch.manual_seed(0)
    rows = sum(LENGTHS)
    q, k, v = (torch.randn(rows, heads, SIZE) for heads in (HEADS, SHARED, SHARED))
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    packed = torch.empty_like(q)
    extend_attention_fwd_unified(q, packed, k, v, 1.0, 1.0, offsets, offsets, torch.arange(rows),
                                 torch.zeros_like(offsets[1:]), max(LENGTHS), sm_scale=SCALE)
    groups = HEADS // SHARED
    exact = torch.cat([F.scaled_dot_product_attention(
        *(one.transpose(0, 1)[None].double() for one in (query, key.repeat_interleave(groups, 1),
                                                         value.repeat_interleave(groups, 1))),
        is_causal=True, scale=SCALE)[0].transpose(0, 1)
        for query, key, value in zip(*(one.split(LENGTHS) for one in (q, k, v)), strict=True)])
    places = torch.randperm(rows)  # in a cache tokens lie anywhere
    keys, values = (torch.empty_like(one).index_copy_(0, places, one) for one in (k, v))
    differ = 0
    for row in range(0, max(LENGTHS), 8):
        going = [(start, row) for start, length in zip(offsets.tolist(), LENGTHS, strict=False) if row < length]
        last = torch.tensor([start + row for start, row in going])
        seen = torch.cat([places[start : start + row + 1] for start, row in going])
        counts = torch.tensor([0, *(row + 1 for _, row in going)]).cumsum(0).int()
        differ += int((attend(q[last], keys, values, counts, seen, SCALE) != packed[last]).sum())
    print(json.dumps({"rope": turned(), "products": multiplied(), "differ": differ,
                      "from_exact": float((packed - exact).abs().max())}))


def turned() -> int:
    """Numbers of a rope in float16 that are not transformers', which rounds each product and each sum."""
    q, k, cos, sin = (torch.randn(1, 5, *heads, SIZE).half() for heads in ((HEADS,), (SHARED,), (), ()))
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    pairs = zip((q, k), apply_rotary_pos_emb(q, k, cos, sin), strict=True)
    return sum(int((turn(rows[0], cos[0], sin[0]) != theirs[0]).sum()) for rows, theirs in pairs)


def multiplied() -> dict[str, int]:
    """Numbers of products of few integers, which every order adds up alike, that are wrong; by blocks."""
    a, b, bias = (torch.randint(-4, 5, shape).float() for shape in ((70, 40), (50, 40), (50,)))
    exact = a @ b.t() + bias
    sizes = {blocks(1, 1024), blocks(1, 151936), blocks(256, 151936)}
    return {str(each): int((multiply(a, b.t(), bias, each, processors=7) != exact).sum()) for each in sizes}


main()
