"""Attention with one order of additions: a token that decodes has the bits of the same row of a prefill.

Keys are taken in chunks whose bounds depend on nothing but a key's position. Within a chunk softmax runs online over
tiles of keys (FlashAttention, arXiv 2205.14135); then chunks are added up from the first to the last. Prefill does so
in one program for some rows of one head. Decoding has a program for each chunk, as split-KV decoding does, and adds
up the same partial sums in the same order.

Servers and trainers under --true-on-policy-mode both compute by this file; it needs torch and Triton alone.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

CHUNK = 256
"""Keys of each of the first chunks."""
LEVEL = 16
"""Chunks of one size; those after them have twice as many keys, so that long sequences have few partial sums."""
TILE = 32
"""Keys at a time. It is part of the order of additions, which rows and warps of a program are not."""
ROWS = 64
"""Tokens of a program of prefill."""


def prefill(q: torch.Tensor, o: torch.Tensor, k_buffer: torch.Tensor, v_buffer: torch.Tensor, k_scale: float,
            v_scale: float, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor,
            prefix_lens: torch.Tensor, max_len_extend: int, sm_scale: float, page_size: int = 1,
            **unused: Any) -> None:
    """Causal attention of each sequence's new tokens. The arguments are those of SGLang's extend_attention_fwd_unified.

    Args:
        q: [tokens, heads, D] of the new tokens; o: as q, which it writes.
        k_buffer, v_buffer: [cache, heads for keys, D].
        qo_indptr: [sequences + 1] int32: where each sequence's new tokens begin.
        kv_indptr: [sequences + 1] int32: where each sequence's keys begin in kv_indices, with those of new tokens.
        kv_indices: places in the cache.
        prefix_lens: [sequences] keys before the new tokens.
        max_len_extend: new tokens of the longest.
        page_size: of the cache; places are those of tokens whatever it is.

    Raises:
        NotImplementedError: something else is asked for than causal attention of 16 or 32 bits.
    """
    _refuse(k_buffer, k_scale, v_scale, unused)
    lanes = triton.next_power_of_2(q.shape[-1])
    _prefill[(len(prefix_lens), q.shape[1], triton.cdiv(max_len_extend, ROWS))](
        q, k_buffer, v_buffer, o, kv_indptr, kv_indices, prefix_lens, qo_indptr, *q.stride()[:2],
        *k_buffer.stride()[:2], *v_buffer.stride()[:2], *o.stride()[:2], sm_scale,
        GROUP=q.shape[1] // k_buffer.shape[1], D=q.shape[-1], LANES=lanes, ROWS=ROWS, TILE=TILE, num_warps=4,
        num_stages=3)


def _refuse(keys: torch.Tensor, k_scale: float, v_scale: float, unused: dict[str, Any]) -> None:
    """
    Raises:
        NotImplementedError: see `prefill`.
    """
    usual = {"is_causal": True, "logit_cap": 0.0, "sliding_window_size": -1, "xai_temperature_len": -1}
    odd = [name for name, value in unused.items() if value is not None and value != usual.get(name)]
    odd += ["scales of keys"] if (k_scale, v_scale) != (1.0, 1.0) else []
    odd += ["pages"] if keys.dim() != 3 else []
    if odd:
        raise NotImplementedError(f"--true-on-policy-mode computes causal attention alone, got {', '.join(odd)}")


def decode(q: torch.Tensor, k_buffer: torch.Tensor, v_buffer: torch.Tensor, kv_indptr: torch.Tensor,
           kv_indices: torch.Tensor, longest: int, sm_scale: float) -> torch.Tensor:
    """Attention of each sequence's last token, whose key is in the cache. Heads that share keys are rows of a program.

    Args:
        q: [sequences, heads, D]; the others are as for `prefill`.
        longest: keys that a sequence may have at most, as a CUDA graph is for any lengths.

    Returns:
        [sequences, heads, D].
    """
    (sequences, heads, size), shared, chunks = q.shape, k_buffer.shape[1], chunks_of(longest)
    most = torch.empty(sequences, chunks, heads, device=q.device)
    total, partial = torch.empty_like(most), torch.empty(sequences, chunks, heads, size, device=q.device)
    attended = torch.empty_like(q)
    shapes = {"GROUP": heads // shared, "D": size, "LANES": triton.next_power_of_2(size),
              "ROWS": max(16, triton.next_power_of_2(heads // shared))}
    _decode[(sequences, shared, chunks)](
        q, k_buffer, v_buffer, most, total, partial, kv_indptr, kv_indices, *q.stride()[:2], *k_buffer.stride()[:2],
        *v_buffer.stride()[:2], sm_scale, **shapes, TILE=TILE, num_warps=1, num_stages=3)  # two warps: another order
    _combine[(sequences, shared)](most, total, partial, attended, kv_indptr, *attended.stride()[:2], chunks, **shapes,
                                  num_warps=1)
    return attended


def chunks_of(keys: int) -> int:
    """Chunks of a sequence of so many keys."""
    chunks, size = 0, CHUNK
    while keys > LEVEL * size:
        chunks, keys, size = chunks + LEVEL, keys - LEVEL * size, 2 * size
    return chunks + triton.cdiv(keys, size)


@triton.jit
def _begin(chunk, SIZE: tl.constexpr = CHUNK, EACH: tl.constexpr = LEVEL):
    """The first key of a chunk."""
    return (SIZE << (chunk // EACH)) * (EACH + chunk % EACH) - EACH * SIZE


@triton.jit
def _attend(q, K, V, places, first, stop, position, lanes, k_row, v_row, scale, D: tl.constexpr, LANES: tl.constexpr,
            ROWS: tl.constexpr, TILE: tl.constexpr):
    """Of keys first .. stop - 1, those up to each row's position: (greatest score, sum of weights, weighted values)."""
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, LANES], tl.float32)
    for start in range(first, stop, TILE):
        key = start + tl.arange(0, TILE)
        place = tl.load(places + key, mask=key < stop, other=0)
        k = tl.load(K + place[None, :] * k_row + lanes[:, None], mask=(key < stop)[None, :] & (lanes < D)[:, None],
                    other=0.0)
        scores = tl.dot(q, k) * scale
        seen = (key < stop)[None, :] & (key[None, :] <= position[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # a row that sees none of these keys
        weights, before = tl.exp(scores - shift[:, None]), tl.exp(most - shift)
        v = tl.load(V + place[:, None] * v_row + lanes[None, :], mask=(key < stop)[:, None] & (lanes < D)[None, :],
                    other=0.0)
        total = total * before + tl.sum(weights, 1)
        out = out * before[:, None] + tl.dot(weights.to(v.dtype), v)
        most = higher
    return most, total, out


@triton.jit
def _added(most, total, out, chunk_most, chunk_total, chunk_out):
    """One more chunk beside those before it."""
    higher = tl.maximum(most, chunk_most)
    before, after = tl.exp(most - higher), tl.exp(chunk_most - higher)
    total = total * before + chunk_total * after
    return higher, total, out * before[:, None] + chunk_out * after[:, None]


@triton.jit
def _prefill(Q, K, V, Out, kv_indptr, kv_indices, prefix_lens, qo_indptr, q_row, q_head, k_row, k_head, v_row, v_head,
             o_row, o_head, scale, GROUP: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
             TILE: tl.constexpr):
    """Some rows of one head of one sequence."""
    sequence, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.load(qo_indptr + sequence).to(tl.int64)
    length = (tl.load(qo_indptr + sequence + 1) - begin).to(tl.int32)
    if block * ROWS >= length:
        return
    row, lanes, prefix = block * ROWS + tl.arange(0, ROWS), tl.arange(0, LANES), tl.load(prefix_lens + sequence)
    position, end = prefix + row, prefix + tl.minimum(block * ROWS + ROWS, length)
    mask = (row < length)[:, None] & (lanes < D)[None, :]
    q = tl.load(Q + (begin + row)[:, None] * q_row + head * q_head + lanes[None, :], mask=mask, other=0.0)
    places = kv_indices + tl.load(kv_indptr + sequence)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, LANES], tl.float32)
    chunk = 0
    while _begin(chunk) < end:
        chunk_most, chunk_total, chunk_out = _attend(
            q, K + (head // GROUP) * k_head, V + (head // GROUP) * v_head, places, _begin(chunk),
            tl.minimum(_begin(chunk + 1), end), position, lanes, k_row, v_row, scale, D, LANES, ROWS, TILE)
        most, total, out = _added(most, total, out, chunk_most, chunk_total, chunk_out)
        chunk += 1
    out = (out / total[:, None]).to(Out.dtype.element_ty)
    tl.store(Out + (begin + row)[:, None] * o_row + head * o_head + lanes[None, :], out, mask=mask)


@triton.jit
def _decode(Q, K, V, Most, Total, Partial, kv_indptr, kv_indices, q_row, q_head, k_row, k_head, v_row, v_head, scale,
            GROUP: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):
    """One chunk of one sequence, for the heads that share keys."""
    sequence, shared, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.load(kv_indptr + sequence)
    length = tl.load(kv_indptr + sequence + 1) - begin
    if _begin(chunk) >= length:
        return
    row, lanes = tl.arange(0, ROWS), tl.arange(0, LANES)
    mask, head = (row < GROUP)[:, None] & (lanes < D)[None, :], shared * GROUP + row
    q = tl.load(Q + sequence * q_row + head[:, None] * q_head + lanes[None, :], mask=mask, other=0.0)
    most, total, out = _attend(
        q, K + shared * k_head, V + shared * v_head, kv_indices + begin, _begin(chunk),
        tl.minimum(_begin(chunk + 1), length), tl.zeros([ROWS], tl.int32) + length, lanes, k_row, v_row, scale, D,
        LANES, ROWS, TILE)
    at = (sequence * tl.num_programs(2) + chunk) * tl.num_programs(1) * GROUP + head
    tl.store(Most + at, most, mask=row < GROUP)
    tl.store(Total + at, total, mask=row < GROUP)
    tl.store(Partial + at[:, None] * D + lanes[None, :], out, mask=mask)


@triton.jit
def _combine(Most, Total, Partial, Out, kv_indptr, o_row, o_head, chunks, GROUP: tl.constexpr, D: tl.constexpr,
             LANES: tl.constexpr, ROWS: tl.constexpr):
    """The chunks of one sequence, for the heads that share keys."""
    sequence, shared = tl.program_id(0), tl.program_id(1)
    length = tl.load(kv_indptr + sequence + 1) - tl.load(kv_indptr + sequence)
    row, lanes = tl.arange(0, ROWS), tl.arange(0, LANES)
    mask, head = (row < GROUP)[:, None] & (lanes < D)[None, :], shared * GROUP + row
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, LANES], tl.float32)
    chunk = 0
    while _begin(chunk) < length:
        at = (sequence * chunks + chunk) * tl.num_programs(1) * GROUP + head
        chunk_most = tl.load(Most + at, mask=row < GROUP, other=0.0)
        chunk_total = tl.load(Total + at, mask=row < GROUP, other=1.0)
        chunk_out = tl.load(Partial + at[:, None] * D + lanes[None, :], mask=mask, other=0.0)
        most, total, out = _added(most, total, out, chunk_most, chunk_total, chunk_out)
        chunk += 1
    out = (out / total[:, None]).to(Out.dtype.element_ty)
    tl.store(Out + sequence * o_row + head[:, None] * o_head + lanes[None, :], out, mask=mask)
