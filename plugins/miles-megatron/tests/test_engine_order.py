"""In the engine's order a row has the engine's bits, whatever it is packed with; values and gradients stay."""

import pytest
import torch
import torch.nn.functional as F
from miles_local.cache import round_up
from miles_local.decode import Attention, unseen
from miles_local.products import linear

SHAPES = {"deep": (2048, 96), "wide": (96, 640), "router": (64, 6)}
"""Inputs and outputs of a product."""


@pytest.fixture
def order(megatron):
    from miles_megatron.engine_order import EngineOrder

    return EngineOrder


@pytest.mark.parametrize("product", [
    lambda x, weight: torch.matmul(x, weight.t()), lambda x, weight: torch.mm(x[:, 0], weight.t())[:, None],
    F.linear], ids=["matmul", "mm", "linear"])  # fmt: skip
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_has_the_engines_bits_for_each_row(order, product, shape):
    inputs, outputs = SHAPES[shape]
    x, weight = torch.randn(333, 1, inputs), torch.randn(outputs, inputs)
    with order():
        out = product(x, weight)
    padded = F.pad(weight, (0, 0, 0, -outputs % 16))
    alone = [linear(F.pad(row, (0, 0, 0, 15)), padded)[:1, :outputs] for row in x]
    assert out.shape == (333, 1, outputs)
    assert torch.equal(out, torch.stack(alone))
    torch.testing.assert_close(out, product(x, weight), rtol=1e-4, atol=1e-3)


def decoded(q, k, v, window):
    """[n, T, d], [g, T, d] twice -> [n, T, d] as the engine attends: one query after the other, over what is cached."""
    (heads, count, width), groups, rows = q.shape, k.shape[0], []
    for place in range(count):
        cached = round_up(place + 1)
        attention = Attention(groups, heads // groups, cached, 1, width)
        mask = unseen(torch.tensor([place]), cached, window)[:, None]
        past = (F.pad(x, (0, 0, 0, -count % 16))[:, :cached].contiguous() for x in (k, v))
        rows.append(attention(q[:, place].reshape(groups, -1, width), *past, mask).reshape(heads, width))
    return torch.stack(rows, 1)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("count", [150, 240, 300, 544])
def test_attention_has_the_bits_of_decoding(order, count, window):
    torch.manual_seed(count)
    q, k, v = (2 * torch.randn(heads, count, 16) for heads in (4, 2, 2))
    padded = [F.pad(x, (0, 0, 0, -count % 16))[None] for x in (q, k, v)]
    places = torch.arange(padded[0].shape[2])
    behind = places[:, None] - places
    mask = None if window is None else (behind >= 0) & (behind < window)
    with order():
        out = F.scaled_dot_product_attention(*padded, attn_mask=mask, is_causal=mask is None, scale=0.25,
                                             enable_gqa=True)
    assert torch.equal(out[0, :, :count], decoded(q, k, v, window))


def test_gradients_are_those_of_torchs_own(order):
    inputs = [torch.randn(1, heads, 320, 16, requires_grad=True) for heads in (4, 2, 2)]
    weight = torch.randn(20, 16, requires_grad=True)

    def gradients():
        attended = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
        return torch.autograd.grad(torch.matmul(attended, weight.t()).sin().sum(), [*inputs, weight])

    expected = gradients()
    with order():
        ours = gradients()
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_other_calls_are_torchs(order):
    left, right = torch.randn(3, 4, 5), torch.randn(3, 5, 2)
    with order():
        assert torch.equal(torch.matmul(left, right), torch.bmm(left, right))
        assert torch.equal(torch.mm(left[0], right[0], out=torch.empty(4, 2)), left[0].mm(right[0]))
