"""Bytes and scales of all recipes against the formats' definitions (fp8_reference.py); gradients straight through."""

import numpy as np
import pytest
import torch
from fp8_reference import E4M3, E5M2, nearest, rounded, scales, spread
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_fp8.recipe import RECIPES, ROWS, WEIGHTS, Tiles
from miles_fp8.rounding import dequantise, from_bytes, quantise, to_bytes
from miles_fp8.rounding import rounded as ours


@st.composite
def matrices(draw, dtypes=(torch.float32, torch.bfloat16)):
    """Any shape, some whole tiles of zeros, magnitudes that differ from tile to tile by much."""
    rows, columns = draw(st.integers(1, 300)), draw(st.integers(1, 300))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    x = torch.randn(rows, columns, generator=generator)
    x *= torch.exp2(torch.randint(-30, 30, (rows, 1), generator=generator).float())
    if draw(st.booleans()):
        x[: rows // 2] = 0
    return x.to(draw(st.sampled_from(dtypes)))


def test_every_byte_means_what_torch_says():
    for table, dtype in ((E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)):
        them = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
        np.testing.assert_array_equal(table.astype(np.float32), them)


@pytest.mark.parametrize("tiles", [*WEIGHTS.values(), *ROWS.values(), Tiles(64, 32, powers=True)], ids=str)
@settings(max_examples=15, deadline=None)
@given(x=matrices())
def test_bytes_and_scales_are_the_definitions(tiles, x):
    held, scale = quantise(x, tiles)
    wide, cut = x.float().numpy(), (tiles.rows, tiles.columns)
    wanted = scales(wide, *cut, tiles.powers)
    assert held.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32 and held.shape == x.shape
    assert scale.shape == (wanted.shape if tiles.rows else ()), "one number where there is one tile"
    np.testing.assert_array_equal(scale.numpy().reshape(wanted.shape), wanted)
    each = spread(wanted, wide.shape, *cut)
    np.testing.assert_array_equal(held.float().numpy(), nearest(wide / each, E4M3).astype(np.float32))
    back = dequantise(held, scale, tiles)
    np.testing.assert_array_equal(back.numpy(), rounded(wide, *cut, tiles.powers))
    np.testing.assert_array_equal(ours(x, tiles).float().numpy(), back.to(x.dtype).float().numpy())


@settings(max_examples=30, deadline=None)
@given(x=matrices(dtypes=(torch.float32,)))
def test_a_scale_of_mxfp8_is_the_least_power_of_two_that_fits_and_one_byte(x):
    held, scale = quantise(x, WEIGHTS["mxfp8"])
    held, byte = held.float(), to_bytes(scale)
    assert byte.dtype == torch.uint8 and torch.equal(from_bytes(byte), scale)
    assert torch.equal(byte.view(torch.float8_e8m0fnu).float(), scale), "torch's own reading of the byte"
    assert torch.equal(dequantise(held, byte, WEIGHTS["mxfp8"]), dequantise(held, scale, WEIGHTS["mxfp8"]))
    amax = torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).view(x.shape[0], -1, 32).abs().amax(-1)
    some = amax > 0
    assert (amax[some] / scale[some] <= 448).all() and (amax[some] / scale[some] * 2 > 448).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_no_number_stays_visible(recipe):
    for wrong in (float("nan"), float("inf")):
        x = torch.ones(4, 256)
        x[1, 3] = wrong
        found = ours(x, ROWS[recipe])
        assert found[1, 3].isnan()
        assert recipe == "tensorwise" or (found[2:].isfinite().all() and found[1, 128:].isfinite().all())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_gradients_go_straight_through_and_are_rounded_on_their_way(recipe, kind):
    from miles_fp8.emulate import _Rounded, _RoundedGradient

    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=draw, requires_grad=True) for shape in ((6, 5, 200), (130, 200)))
    grad = torch.randn(6, 5, 130, generator=draw)
    out = _RoundedGradient.apply(_Rounded.apply(x, ROWS[recipe]) @ _Rounded.apply(weight, WEIGHTS[recipe]).t(),
                                 ROWS[recipe], kind)
    out.backward(grad)

    def reference(tensor, tiles, table=E4M3):
        flat = tensor.detach().numpy().reshape(-1, tensor.shape[-1])
        return rounded(flat, tiles.rows, tiles.columns, tiles.powers, table)

    x8, w8 = reference(x, ROWS[recipe]), reference(weight, WEIGHTS[recipe])
    g8 = reference(grad, ROWS[recipe], E4M3 if kind == torch.float8_e4m3fn else E5M2)
    close = dict(rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(out.detach().numpy().reshape(-1, 130), x8 @ w8.T, **close)
    np.testing.assert_allclose(x.grad.numpy().reshape(-1, 200), g8 @ w8, **close)
    np.testing.assert_allclose(weight.grad.numpy(), g8.T @ x8, **close)
    exact = grad.numpy().reshape(-1, 130).T @ x.detach().numpy().reshape(-1, 200)
    assert np.abs(weight.grad.numpy() - exact).max() > 0.05, "a product that nothing rounds differs"
