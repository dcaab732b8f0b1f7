"""Quantise, pack, unpack: against compressed-tensors, which shares no code with this; the straight-through gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_int4_qat import quantise

THEIRS = BaseCompressor.get_value_from_registry("pack-quantized")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def scheme(group_size):
    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group_size)
    return QuantizationScheme(targets=["Linear"], weights=args)


@st.composite
def weights(draw, dtypes=DTYPES):
    """(weight, group size): from groups of zeros and of 1e-7 to groups with an outlier of 100."""
    size = draw(st.sampled_from([32, 64, 128]))
    rows, groups = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    weight = torch.randn(rows, groups, size, generator=seed)
    weight *= torch.tensor([0.0, 1e-7, 1e-3, 0.02, 1.0])[torch.randint(5, (rows, groups, 1), generator=seed)]
    if draw(st.booleans()):
        weight[0, 0, draw(st.integers(0, size - 1))] = draw(st.sampled_from([-100.0, 100.0, 1e-4]))
    return weight.flatten(1).to(draw(st.sampled_from(dtypes))), size


@settings(max_examples=60, deadline=None)
@given(weights())
def test_packed_bits_are_those_of_compressed_tensors(case):
    weight, size = case
    values, _ = quantise.quantise(weight, size, weight.dtype)
    packed = quantise.pack(values)
    assert packed.dtype == torch.int32 and torch.equal(packed, pack_to_int32(values, 4))
    assert torch.equal(quantise.unpack(packed), values)
    assert torch.equal(unpack_from_int32(packed, 4, weight.shape), values)


@settings(max_examples=60, deadline=None)
@given(weights())
def test_what_compressed_tensors_unpacks_is_the_forwards_weight(case):
    """To the bit, in the weight's dtype."""
    weight, size = case
    values, scale = quantise.quantise(weight, size, weight.dtype)
    state = {"weight_packed": quantise.pack(values), "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}
    theirs = THEIRS.decompress(state, scheme(size))["weight"]
    (ours,) = quantise.fake_quantised(size, weight.dtype, weight)
    assert theirs.dtype == ours.dtype == weight.dtype and torch.equal(theirs, ours)


@settings(max_examples=60, deadline=None)
@given(weights(dtypes=(torch.float32,)))
def test_compressed_tensors_quantises_to_the_same_values(case):
    """By our scales; in float32, since it divides in the weight's own dtype."""
    weight, size = case
    values, scale = quantise.quantise(weight, size, torch.float32)
    theirs = THEIRS.compress({"weight": weight, "weight_scale": scale}, scheme(size))
    assert torch.equal(theirs["weight_packed"], quantise.pack(values))
    assert theirs["weight_shape"].tolist() == list(weight.shape)


@settings(max_examples=60, deadline=None)
@given(weights())
def test_values_are_the_nearest_and_none_is_cut_off(case):
    weight, size = case
    values, scale = quantise.quantise(weight, size, weight.dtype)
    wide = weight.double().numpy().reshape(len(weight), -1, size)
    exact = np.maximum(np.abs(wide).max(-1) / 7, 1e-5)
    step = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-8}[weight.dtype]  # 1e-5 is subnormal
    np.testing.assert_allclose(scale.double(), exact, rtol=step)
    ratio = wide / scale.double().numpy()[..., None]
    assert np.abs(ratio).max() < 7.5, "the clamp never bites"
    assert np.abs(ratio - values.double().numpy().reshape(ratio.shape)).max() <= 0.5 + 1e-6
    most = np.abs(values.numpy().reshape(ratio.shape)).max(-1)
    assert (most[exact > 1e-5] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_passes_as_if_nothing_were_rounded(dtype, monkeypatch):
    """Of every entry, the largest of each group included; one weight, several together, and several in pieces."""
    draw = torch.Generator().manual_seed(0)
    held = [torch.randn(3, 64, generator=draw).to(dtype).requires_grad_() for _ in range(5)]
    wanted = [torch.randn(3, 64, generator=draw).to(dtype) for _ in held]
    for most in (1 << 26, 2 * 3 * 64, 64):
        monkeypatch.setattr(quantise, "PIECE", most)
        for count in (1, 5):
            outs = quantise.fake_quantised(32, dtype, *held[:count])
            torch.autograd.backward(outs, wanted[:count])
            for weight, out, gradient in zip(held, outs, wanted, strict=False):
                assert torch.equal(weight.grad, gradient)
                assert out.shape == weight.shape and not torch.equal(out, weight)
                assert torch.equal(out, quantise.rounded(weight, 32, dtype))
                weight.grad = None


def test_a_large_weight_is_rounded_in_pieces_to_the_same_bits(monkeypatch):
    weight = torch.randn(37, 128)
    whole = quantise.quantise(weight, 32, torch.bfloat16)
    monkeypatch.setattr(quantise, "PIECE", 500)
    assert all(torch.equal(*pair) for pair in zip(whole, quantise.quantise(weight, 32, torch.bfloat16), strict=True))


def test_groups_that_do_not_divide_are_an_error():
    with pytest.raises(ValueError, match="groups of 32 do not divide an input axis of 48"):
        quantise.quantise(torch.zeros(2, 48), 32, torch.float32)
