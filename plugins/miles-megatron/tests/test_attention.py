"""Packed attention against attention one sequence at a time: buckets, windows, softcaps, context parallelism."""

import math
from types import SimpleNamespace

import pytest
import torch
from miles_megatron.specs import Warming

CU = [0, 13, 53, 54, 91, 155, 200]
CONFIG = SimpleNamespace(kv_channels=16, attention_dropout=0.0, num_attention_heads=4, params_dtype=torch.float32)


@pytest.fixture(scope="module")
def packed_layout(megatron):
    from miles_megatron import packed_layout

    return packed_layout


@pytest.fixture(scope="module")
def packed(megatron):
    """(**parts) -> a PackedAttention with heads of 16 channels."""
    from miles_megatron.attention import PackedAttention

    return lambda **parts: PackedAttention(CONFIG, 1, None, "self", **parts)


WARMING = Warming(slope=0.5, step=16, first=1)


def last_keys(cu, blocks):
    """[T] of the last key that each row sees, where rows first:end of the whole see one another."""
    last = torch.cat([torch.arange(b - a) for a, b in zip(cu[:-1], cu[1:], strict=True)])
    for first, end in blocks:
        last[first:end] = last[end - 1].clone()
    return last


def reference(q, k, v, cu, window=None, softcap=None, sinks=None, warming=None, last=None):
    repeat, out = q.shape[1] // k.shape[1], []
    for a, b in zip(cu[:-1], cu[1:], strict=True):
        query, key, value = (x[a:b].transpose(0, 1) for x in (q, k.repeat_interleave(repeat, 1),
                                                              v.repeat_interleave(repeat, 1)))
        if warming is not None:
            steps = [(position + warming.first) // warming.step for position in range(b - a)]
            query = query * torch.tensor([1 + warming.slope * math.log(1 + each) for each in steps])[:, None]
        scores = query @ key.transpose(1, 2) * q.shape[-1] ** -0.5
        scores = scores if softcap is None else (scores / softcap).tanh() * softcap
        behind = torch.arange(b - a)[:, None] - torch.arange(b - a)
        visible = behind >= 0 if last is None else torch.arange(b - a) <= last[a:b, None]
        visible = visible & (behind < (window or b - a))
        scores = scores.masked_fill(~visible, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, b - a, 1)], -1)
        shares = scores.softmax(-1)[..., : b - a]
        out.append((shares @ value).transpose(0, 1).flatten(1))
    return torch.cat(out)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 80, 81, 130, 1000, 1025, 8193])
def test_a_bucket_holds_whole_kernels_and_wastes_fifteen_rows_or_an_eighth(packed_layout, length):
    assert length <= packed_layout._padded(length) <= max(length + packed_layout.ROWS - 1, length * 9 / 8)
    assert packed_layout._padded(length) % packed_layout.ROWS == 0


def test_a_layout_covers_every_row_once(packed_layout):
    made = packed_layout.make_packed_layout([0, 13, 53, 54, 91, 155, 155, 195], 200)
    assert sum(b.sequences for b in made.buckets) == 7  # six and the tail; the empty one is nothing
    picked = made.query_rows[made.query_back]
    assert torch.equal(picked, torch.arange(200))
    assert torch.equal(made.positions[:13], torch.arange(13)) and int(made.positions[53]) == 0


def test_rows_that_lie_right_are_not_copied(packed_layout):
    assert packed_layout.make_packed_layout([0, 80, 160, 240], 240).query_rows is None


def test_a_window_beyond_a_bucket_leaves_it_to_plain_causality(packed_layout):
    bucket, = packed_layout.make_packed_layout([0, 80, 160], 160).buckets
    assert bucket.mask() is None and bucket.mask(80) is None
    assert bucket.mask(79).sum() == 80 * 81 / 2 - 1 and bucket.mask(79) is bucket.mask(79)


@pytest.mark.parametrize("heads", [(4, 2), (3, 3)])
@pytest.mark.parametrize("parts", [{}, {"window": 20}, {"softcap": 0.7}, {"window": 1, "softcap": 0.7},
                                   {"warming": WARMING}],
                         ids=lambda parts: "-".join(parts) or "plain")
def test_packed_attention_is_attention_one_by_one_with_gradients(packed_layout, packed, heads, parts):
    attention = packed(**parts)
    q, k, v = (torch.randn(200, n, 16, requires_grad=True) for n in (heads[0], heads[1], heads[1]))
    grad = torch.randn(200, heads[0] * 16)
    out = attention(q, k, v, packed_seq_params=packed_layout.packed_rows(CU))
    expected = reference(q, k, v, CU, **parts)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=0)
    for a, b in zip(torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(expected, (q, k, v), grad),
                    strict=True):  # fmt: skip
        torch.testing.assert_close(a, b, atol=5e-6, rtol=0)


@pytest.mark.parametrize("parts", [{}, {"window": 12}, {"softcap": 0.7}, {"sinks": True}],
                         ids=lambda parts: "-".join(parts) or "plain")
def test_rows_of_a_block_see_one_another(packed_layout, packed, parts):
    """Of sequences in one bucket and in others, at their beginnings and ends; what has none has the bits of before."""
    last = last_keys(CU, [(18, 34), (91, 121), (141, 155), (196, 200)])
    attention = packed(**parts)
    attention.sinks is None or attention.sinks.data.normal_()
    q, k, v = (torch.randn(200, n, 16, requires_grad=True) for n in (4, 2, 2))
    grad = torch.randn(200, 64)
    out = attention(q, k, v, packed_seq_params=packed_layout.packed_rows(CU, last=last))
    expected = reference(q, k, v, CU, **parts | {"sinks": attention.sinks}, last=last)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=0)
    for a, b in zip(torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(expected, (q, k, v), grad),
                    strict=True):  # fmt: skip
        torch.testing.assert_close(a, b, atol=5e-6, rtol=0)
    plain = attention(q, k, v, packed_seq_params=packed_layout.packed_rows(CU))
    assert torch.equal(plain[:13], out[:13]) and not torch.allclose(plain[18:33], out[18:33], atol=1e-2)


@pytest.mark.parametrize("window", [None, 20])
def test_a_sink_is_a_score_whose_share_is_of_no_value(packed_layout, packed, window):
    """Of each head; it gets a gradient."""
    attention = packed(window=window, sinks=True)
    attention.sinks.data.normal_()
    q, k, v = (torch.randn(200, n, 16, requires_grad=True) for n in (4, 2, 2))
    grad, moving = torch.randn(200, 64), (q, k, v, attention.sinks)
    out = attention(q, k, v, packed_seq_params=packed_layout.packed_rows(CU))
    expected = reference(q, k, v, CU, window, sinks=attention.sinks)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=0)
    for a, b in zip(torch.autograd.grad(out, moving, grad), torch.autograd.grad(expected, moving, grad), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=0)


@pytest.mark.parametrize("parts", [{}, {"window": 5}, {"softcap": 0.7}, {"warming": WARMING}],
                         ids=lambda parts: "-".join(parts) or "plain")
def test_a_batch_without_packing_is_the_same(packed, parts):
    q, k, v = (torch.randn(30, 2, 3, 16) for _ in range(3))
    out = packed(**parts)(q, k, v)
    for i in range(2):
        torch.testing.assert_close(out[:, i], reference(q[:, i], k[:, i], v[:, i], [0, 30], **parts), atol=2e-6, rtol=0)


@pytest.mark.parametrize("parts", [{}, {"window": 10}, {"window": 10, "softcap": 0.7}],
                         ids=lambda parts: "-".join(parts) or "plain")
@pytest.mark.parametrize("blocks", [[], [(20, 40)]], ids=["causal", "blocks"])
@pytest.mark.parametrize("size", [2, 4])
def test_context_parallel_layouts_give_each_rank_its_rows(packed_layout, packed, size, blocks, parts):
    """The zigzag of columns.split, with keys gathered rank after rank as all_gather lays them."""
    cu, total = [0, 16, 48, 64, 72], 72
    q, k, v = (torch.randn(total, 2, 16) for _ in range(3))
    last = last_keys(cu, blocks)
    expected = reference(q, k, v, cu, **parts, last=last)
    attention = packed(**parts)

    def rows(rank):
        found = []
        for a, b in zip(cu[:-1], cu[1:], strict=True):
            chunks = torch.arange(a, b).chunk(2 * size)
            found += [chunks[rank], chunks[2 * size - 1 - rank]]
        return torch.cat(found)

    gathered_k, gathered_v = (torch.cat([x[rows(r)] for r in range(size)]) for x in (k, v))
    for rank in range(size):
        made = packed_layout.make_packed_layout(cu, total, rank, size)
        position = torch.cat([torch.arange(b - a) for a, b in zip(cu[:-1], cu[1:], strict=True)])
        assert torch.equal(made.positions, position[rows(rank)])
        made.look_ahead(last[rows(rank)])
        picked_q = q[rows(rank)][made.query_rows] if made.query_rows is not None else q[rows(rank)]
        picked_k, picked_v = gathered_k[made.key_rows], gathered_v[made.key_rows]
        out, at_q, at_k = [], 0, 0
        for b in made.buckets:
            n_q, n_k = b.sequences * b.queries, b.sequences * b.keys
            attended = attention._attend(
                *(x.unflatten(0, (b.sequences, -1)).transpose(1, 2)
                  for x in (picked_q[at_q:at_q + n_q], picked_k[at_k:at_k + n_k], picked_v[at_k:at_k + n_k])),
                b.mask(attention.window))  # fmt: skip
            out.append(attended.transpose(1, 2).flatten(0, 1).flatten(1))
            at_q, at_k = at_q + n_q, at_k + n_k
        out = torch.cat(out)
        out = out[made.query_back] if made.query_back is not None else out
        torch.testing.assert_close(out, expected[rows(rank)], atol=2e-6, rtol=0)


def test_masks_are_refused(packed):
    x = torch.randn(4, 1, 2, 16)
    with pytest.raises(ValueError, match="packed rows"):
        packed()(x, x, x, attention_mask=torch.ones(1, 1, 4, 4, dtype=torch.bool))
