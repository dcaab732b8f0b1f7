import pytest
import torch
import torch.nn.functional as F


@pytest.fixture(scope="module")
def layers(megatron):
    from miles_core.backends.megatron import layers

    return layers


def test_rms_norm_and_its_gradient(layers):
    x = torch.randn(2, 5, 8, dtype=torch.float32)
    norm = layers.RMSNorm(8, 1e-6, torch.float32)
    torch.nn.init.normal_(norm.weight)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    weight = norm.weight.detach().clone().requires_grad_()
    grad = torch.randn(2, 5, 8)
    norm(ours).backward(grad)
    F.rms_norm(theirs, (8,), weight, 1e-6).backward(grad)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (8,), weight, 1e-6))
    torch.testing.assert_close(ours.grad, theirs.grad)
    torch.testing.assert_close(norm.weight.grad, weight.grad)


def test_rms_norm_in_bf16_is_hugging_faces(layers):
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    norm, theirs = layers.RMSNorm(64, 1e-6, torch.bfloat16), Qwen3RMSNorm(64, 1e-6).bfloat16()
    x = torch.randn(50, 64).bfloat16()
    assert (norm(x) - theirs(x)).abs().max() <= 2**-6


def test_swiglu_and_its_gradient(layers, megatron):
    x = torch.randn(1100, 6, dtype=torch.float64, requires_grad=True)
    y = torch.autograd.grad(layers._SwiGLU.apply(x).square().sum(), x)[0]
    gate, up = x.chunk(2, -1)
    expected = torch.autograd.grad((F.silu(gate) * up).square().sum(), x)[0]
    torch.testing.assert_close(y, expected)


def test_rotation_is_hugging_faces_and_backward_turns_back(layers):
    from transformers.models.qwen3.modeling_qwen3 import rotate_half

    x = torch.randn(7, 3, 16, dtype=torch.float64, requires_grad=True)
    cos, sin = layers.Rope(16, 1e4).tables(torch.arange(7), torch.float64)
    out = layers._Rotate.apply(x, cos[:, None], sin[:, None])
    full_cos, full_sin = (torch.cat([t, t], -1)[:, None] for t in (cos, sin))
    torch.testing.assert_close(out, x * full_cos + rotate_half(x) * full_sin)
    back = torch.autograd.grad(out, x, out.detach())[0]
    torch.testing.assert_close(back, x.detach())


@pytest.mark.parametrize("length", [1, 7, 8, 9, 80, 81, 130, 1000, 1025, 8193])
def test_a_bucket_holds_whole_kernels_and_wastes_fifteen_rows_or_an_eighth(layers, length):
    assert length <= layers._padded(length) <= max(length + layers.ROWS - 1, length * 9 / 8)
    assert layers._padded(length) % layers.ROWS == 0


def test_a_plan_covers_every_row_once(layers):
    plan = layers.make_plan([0, 13, 53, 54, 91, 155, 155, 195], 200)
    assert sum(b.sequences for b in plan.buckets) == 7  # six and the tail; the empty one is nothing
    picked = plan.query_rows[plan.query_back]
    assert torch.equal(picked, torch.arange(200))
    assert torch.equal(plan.positions[:13], torch.arange(13)) and int(plan.positions[53]) == 0


def test_rows_that_lie_right_are_not_copied(layers):
    assert layers.make_plan([0, 80, 160, 240], 240).query_rows is None


def reference(q, k, v, cu):
    repeat = q.shape[1] // k.shape[1]
    out = []
    for a, b in zip(cu[:-1], cu[1:], strict=True):
        parts = (x[a:b].transpose(0, 1) for x in (q, k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)))
        out.append(F.scaled_dot_product_attention(*parts, is_causal=True).transpose(0, 1).flatten(1))
    return torch.cat(out)


@pytest.mark.parametrize("heads", [(4, 2), (3, 3)])
def test_packed_attention_is_attention_one_by_one_with_gradients(layers, megatron, heads):
    from types import SimpleNamespace

    cu = [0, 13, 53, 54, 91, 155, 200]
    config = SimpleNamespace(kv_channels=16, attention_dropout=0.0)
    attention = layers.PackedAttention(config, 1, None, "self")
    q, k, v = (torch.randn(200, n, 16, requires_grad=True) for n in (heads[0], heads[1], heads[1]))
    grad = torch.randn(200, heads[0] * 16)
    out = attention(q, k, v, packed_seq_params=layers.packed_rows(cu))
    expected = reference(q, k, v, cu)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=0)
    for a, b in zip(torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(expected, (q, k, v), grad),
                    strict=True):  # fmt: skip
        torch.testing.assert_close(a, b, atol=5e-6, rtol=0)


@pytest.mark.parametrize("size", [2, 4])
def test_context_parallel_plans_give_each_rank_its_rows(layers, megatron, size):
    """The zigzag of columns.split, with keys gathered rank after rank as all_gather lays them."""
    cu, total = [0, 16, 48, 64, 72], 72
    q, k, v = (torch.randn(total, 2, 16) for _ in range(3))
    expected = reference(q, k, v, cu)

    def rows(rank):
        parts = []
        for a, b in zip(cu[:-1], cu[1:], strict=True):
            chunks = torch.arange(a, b).chunk(2 * size)
            parts += [chunks[rank], chunks[2 * size - 1 - rank]]
        return torch.cat(parts)

    gathered_k, gathered_v = (torch.cat([x[rows(r)] for r in range(size)]) for x in (k, v))
    for rank in range(size):
        plan = layers.make_plan(cu, total, rank, size)
        position = torch.cat([torch.arange(b - a) for a, b in zip(cu[:-1], cu[1:], strict=True)])
        assert torch.equal(plan.positions, position[rows(rank)])
        picked_q = q[rows(rank)][plan.query_rows] if plan.query_rows is not None else q[rows(rank)]
        picked_k, picked_v = gathered_k[plan.key_rows], gathered_v[plan.key_rows]
        out, at_q, at_k = [], 0, 0
        for b in plan.buckets:
            n_q, n_k = b.sequences * b.queries, b.sequences * b.keys
            parts = (x.unflatten(0, (b.sequences, -1)).transpose(1, 2)
                     for x in (picked_q[at_q:at_q + n_q], picked_k[at_k:at_k + n_k], picked_v[at_k:at_k + n_k]))
            attended = F.scaled_dot_product_attention(*parts, attn_mask=b.mask)
            out.append(attended.transpose(1, 2).flatten(0, 1).flatten(1))
            at_q, at_k = at_q + n_q, at_k + n_k
        out = torch.cat(out)
        out = out[plan.query_back] if plan.query_back is not None else out
        torch.testing.assert_close(out, expected[rows(rank)], atol=2e-6, rtol=0)


def test_masks_are_refused(layers, megatron):
    from types import SimpleNamespace

    attention = layers.PackedAttention(SimpleNamespace(kv_channels=16, attention_dropout=0.0), 1, None, "self")
    x = torch.randn(4, 1, 2, 16)
    with pytest.raises(ValueError, match="packed rows"):
        attention(x, x, x, attention_mask=torch.ones(1, 1, 4, 4, dtype=torch.bool))
