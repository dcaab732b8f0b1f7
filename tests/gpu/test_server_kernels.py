"""What servers compute under --true-on-policy-mode in other kernels or blocks: the same bits, and in how long.

    PYTHONPATH=SITE python -m pytest tests/gpu/test_server_kernels.py -s
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

SERVER = Path(__file__).parents[2] / "plugins/miles-sglang/src/miles_sglang/server_extension/on_policy"
pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.integration,
              pytest.mark.full]
PRODUCTS = [(1024, 1024), (1024, 2048), (2048, 1024), (1024, 3072), (3072, 1024), (4096, 12288), (2048, 6144),
            (6144, 2048), (1000, 520), (1024, 151936)]
"""Depth and columns."""
MANY = [(128, 256, 64, 8, 3), (256, 128, 64, 8, 3), (128, 128, 64, 4, 4), (128, 256, 64, 8, 4)]
"""Rows, columns, depth, warps and stages of blocks for many rows."""


@pytest.fixture
def server(monkeypatch):
    """The plugin of SGLang's, as a server of the mode has it."""
    pytest.importorskip("sglang")
    monkeypatch.setattr(sys, "path", [*sys.path, str(SERVER)])
    import miles_kernels
    import miles_on_policy

    return SimpleNamespace(**vars(miles_on_policy) | vars(miles_kernels))


def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).bfloat16()


def microseconds(call, times: int = 20) -> float:
    """Of one call among many in a CUDA graph, as servers decode."""
    call()
    torch.cuda.synchronize()
    graph, begin, end = torch.cuda.CUDAGraph(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / times * 1e3


@pytest.mark.parametrize(("depth", "columns"), PRODUCTS)
def test_products_of_other_blocks_are_the_same_bits(server, depth, columns):
    from sglang.srt.batch_invariant_ops.batch_invariant_ops import _matmul_persistent_triton as theirs

    weight, bias = drawn(columns, depth, scale=0.05).t(), drawn(columns) if columns == 2048 else None
    for rows in (1, 7, 64, 65, 200, 512, 4096, 5001):
        given = drawn(rows, depth)
        assert torch.equal(theirs(given, weight, bias), server.product(theirs, given, weight, bias))
    given = drawn(64, depth)
    print(f"64 rows, {depth} -> {columns}: {microseconds(lambda: theirs(given, weight, bias)):.1f} us, "
          f"{microseconds(lambda: server.product(theirs, given, weight, bias)):.1f} with other blocks, "
          f"{microseconds(lambda: torch.bmm(given[None], weight[None])):.1f} by cuBLAS")


@pytest.mark.parametrize("rows", [2048, 16384])
@pytest.mark.parametrize(("depth", "columns"), PRODUCTS[1:8:2])
def test_products_of_many_rows_may_have_other_blocks(server, rows, depth, columns):
    """What prefill and a trainer's step could take; SGLang's own are 128 x 128 x 64, 8 warps, 3 stages."""
    from sglang.srt.batch_invariant_ops.batch_invariant_ops import _matmul_persistent_triton as theirs

    inputs, weight = drawn(rows, depth), drawn(columns, depth, scale=0.05).t()
    processors, expected = server._processors(inputs.device), theirs(inputs, weight, None)
    ways = {"SGLang's": lambda: theirs(inputs, weight, None), "cuBLAS": lambda: torch.bmm(inputs[None], weight[None])}
    ways |= {str(sizes): partial(server.multiply, inputs, weight, None, sizes, processors) for sizes in MANY}
    for sizes in MANY:
        assert torch.equal(ways[str(sizes)](), expected), sizes
    times = {name: round(microseconds(way, 5)) for name, way in ways.items()}
    print(f"{rows} rows, {depth} -> {columns}, us: {times}")


@pytest.mark.parametrize(("length", "size"), [(64, 128), (1, 128), (5, 64), (3000, 128)])
def test_a_rope_in_one_kernel_is_the_same_bits(server, length, size):
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    q, k = (drawn(1, length, heads, size, scale=3).transpose(1, 2) for heads in (14, 2))
    angles = torch.rand(1, length, size // 2, device="cuda").mul(6).repeat(1, 1, 2)
    tables = angles.cos().bfloat16(), angles.sin().bfloat16()
    rope = partial(server.rope, server.turn, None, q, k, *tables)
    for ours, theirs in zip(rope(), apply_rotary_pos_emb(q, k, *tables), strict=True):
        assert torch.equal(ours, theirs)
    print(f"rope of {length} tokens: {microseconds(lambda: apply_rotary_pos_emb(q, k, *tables)):.1f} us, "
          f"{microseconds(rope):.1f} in one kernel")


@pytest.mark.parametrize("rows", [1, 64, 16384])
def test_a_gated_activation_in_one_kernel_is_almost_torchs(server, rows):
    """All numbers of bfloat16 are gates once; trainers and servers of the mode have this kernel, and not torch's."""
    every = torch.arange(-(1 << 15), 1 << 15, device="cuda").short().view(torch.bfloat16)
    every = every[every.isfinite()]
    apart = server.gated(every, torch.ones_like(every)) != torch.nn.functional.silu(every)
    gate, up = drawn(rows, 3072), drawn(rows, 3072)
    assert apart.sum() < 20 and torch.equal(server.gated(gate[:1], up[:1]), server.gated(gate, up)[:1])
    print(f"{int(apart.sum())} of {len(every)} differ; {rows} x 3072: "
          f"{microseconds(lambda: torch.nn.functional.silu(gate) * up):.1f} us, "
          f"{microseconds(lambda: server.gated(gate, up)):.1f} in one kernel")


@pytest.mark.parametrize(("batch", "longest", "size"), [
    *((batch, longest, size) for batch in (1, 64) for longest in (1030, 9000) for size in (64, 80, 128)),
    (64, 1030, 256), (256, 1030, 128)])  # SGLang's own kernel counts to 2^31
def test_a_token_that_decodes_attends_with_the_bits_of_prefill(server, batch, longest, size):
    """Also where the cache has all but some of its tokens; microseconds beside those of SGLang's own kernel."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd_unified as theirs

    lengths = torch.randint(max(1, longest - 1000), longest, (batch,)).tolist()
    offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    last, scale, places = offsets[1:] - 1, size**-0.5, torch.arange(sum(lengths), device="cuda")
    q, k, v = (drawn(sum(lengths), heads, size) for heads in (16, 8, 8))
    packed, again = torch.empty_like(q), torch.empty_like(q)
    whole = (k, v, 1.0, 1.0, offsets, offsets, places, torch.zeros_like(last), max(lengths))
    server.prefill(q, packed, *whole, sm_scale=scale)
    rows = q[last]
    assert torch.equal(server.decode(rows, k, v, offsets, places, 40960, scale), packed[last])
    new = [min(length, 1 + number % 70) for number, length in enumerate(lengths)]
    starts = torch.tensor([0, *new], device="cuda").cumsum(0).int()
    tails = torch.cat([torch.arange(end - count, end) for end, count in zip(offsets[1:].tolist(), new, strict=True)])
    some = torch.empty_like(q[tails])
    server.prefill(q[tails], some, k, v, 1.0, 1.0, starts, offsets, places, offsets.diff() - starts.diff(), max(new),
                   sm_scale=scale)
    assert torch.equal(some, packed[tails])
    print(f"{batch} sequences of {sum(lengths)} keys, heads of {size}: prefill "
          f"{microseconds(lambda: server.prefill(q, packed, *whole, sm_scale=scale), 2):.0f} us, SGLang's "
          f"{microseconds(lambda: theirs(q, again, *whole, sm_scale=scale), 2):.0f}; decode "
          f"{microseconds(lambda: server.decode(rows, k, v, offsets, places, 40960, scale)):.1f} us")
    assert (packed.float() - again.float()).abs().max() < 0.05
