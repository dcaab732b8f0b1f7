"""Draws follow their distribution, depend on (key, index) alone, and restrictions restrict nothing but the draw."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_local.sampling import Draws, StopStrings, _integers, check, draw, uniforms

from miles_core.errors import EngineError
from miles_core.stages.rollout import SamplingParams


def draws(rows, temperature=1.0, top_p=1.0, top_k=-1, first=0, banned=(), key=7):
    keys = np.arange(first, first + rows, dtype=np.uint64) * np.uint64(3) + np.uint64(key)
    return Draws(
        np.full(rows, temperature, np.float32), np.full(rows, top_p, np.float32), np.full(rows, top_k, np.int64),
        uniforms(keys, np.full(rows, 5, np.uint64)), banned,
    )  # fmt: skip


def chi_square_bound(freedom):
    """A statistic above this has a probability below 1e-5 (Wilson-Hilferty); the seeds are fixed."""
    return freedom * (1 - 2 / (9 * freedom) + 4.27 * math.sqrt(2 / (9 * freedom))) ** 3


def chi_square(tokens, probabilities):
    live = probabilities > 0
    expected = probabilities[live] * len(tokens)
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert counts[~live].sum() == 0
    return ((counts[live] - expected) ** 2 / expected).sum(), live.sum() - 1


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, -1), (0.6, 1.0, -1), (1.0, 0.8, -1), (1.0, 1.0, 5), (1.4, 0.9, 9)]
)
def test_draws_follow_the_distribution(temperature, top_p, top_k):
    """Chi-square over 40,000 keys, against the distribution written out for one row in plain Python."""
    logits = torch.randn(24, generator=torch.Generator().manual_seed(1))
    scaled = torch.softmax(logits.double() / temperature, -1).numpy()
    order = np.argsort(-scaled, kind="stable")
    before = np.cumsum(scaled[order]) - scaled[order]
    keep = order[(before < top_p) & (np.arange(24) < (top_k if top_k > 0 else 24))]
    expected = np.zeros(24)
    expected[keep] = scaled[keep] / scaled[keep].sum()
    tokens, log_probs = draw(logits.expand(40_000, -1), draws(40_000, temperature, top_p, top_k))
    statistic, freedom = chi_square(tokens, expected)
    assert statistic < chi_square_bound(freedom)
    np.testing.assert_allclose(log_probs, np.log(scaled[tokens]), atol=2e-6)  # untruncated


@pytest.mark.parametrize("restricted", [{}, {"top_p": 0.7}, {"top_k": 3},
                                        {"top_p": 0.9, "top_k": 40, "temperature": 0.7}])
def test_sums_of_integers_draw_what_sums_of_floats_do(monkeypatch, restricted):
    """As a GPU adds; also where nearly everything is banned."""
    logits = 3 * torch.randn(500, 900, generator=torch.Generator().manual_seed(2))
    logits[7, 11] = 60.0
    asked = draws(500, **restricted, banned=[(7, np.array([11]))])
    expected = draw(logits, asked)
    monkeypatch.setattr("miles_local.sampling._summed", _integers)
    got = draw(logits, asked)
    assert (got[0] == expected[0]).all() and (got[1] == expected[1]).all() and got[0][7] != 11


def test_successive_draws_of_one_key_are_uniform_and_uncorrelated():
    """Index after index under one key, and key after key at one index: uniform in 64 bins, serial correlation nil."""
    counts = np.arange(64_000, dtype=np.uint64)
    for values in (uniforms(np.full(64_000, 11, np.uint64), counts), uniforms(counts, np.zeros(64_000, np.uint64))):
        assert values.min() >= 0
        assert values.max() < 1
        statistic, freedom = chi_square((values * 64).astype(np.int64), np.full(64, 1 / 64))
        assert statistic < chi_square_bound(freedom)
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 4 / math.sqrt(len(values))


def test_keys_that_differ_by_the_generators_stride_give_unrelated_streams():
    """With an unmixed key, draw i + 1 of key k would be draw i of key k + stride."""
    keys = np.array([5, (5 + 0x9E3779B97F4A7C15) % 2**64], np.uint64)
    first = uniforms(np.repeat(keys[:1], 100), np.arange(100, dtype=np.uint64))
    second = uniforms(np.repeat(keys[1:], 100), np.arange(100, dtype=np.uint64))
    assert not np.isin(first, second).any()


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(0, 40), st.sampled_from([-1, 3]), st.sampled_from([1.0, 0.7]))
def test_a_row_draws_the_same_among_any_others(rows, first, top_k, top_p):
    """Exactly the same token and log-prob for any slice of the batch."""
    logits = torch.randn(80, 50, generator=torch.Generator().manual_seed(2)) * 3
    every = draw(logits, draws(80, 0.9, top_p, top_k))
    part = draw(logits[first : first + rows].clone(), draws(rows, 0.9, top_p, top_k, first=first))
    assert (part[0] == every[0][first : first + rows]).all()
    assert (part[1] == every[1][first : first + rows]).all()


def test_large_vocabularies_are_drawn_in_portions_with_the_same_result(monkeypatch):
    logits = torch.randn(37, 50, generator=torch.Generator().manual_seed(3))
    banned = [(0, np.array([1, 2])), (36, np.array([4]))]
    whole = draw(logits, draws(37, banned=banned))
    monkeypatch.setattr("miles_local.sampling._CHUNK", 500)
    portions = draw(logits, draws(37, banned=banned))
    assert (portions[0] == whole[0]).all()
    assert (portions[1] == whole[1]).all()


def test_temperature_zero_is_argmax_with_log_probs_at_temperature_one():
    logits = torch.randn(9, 30, generator=torch.Generator().manual_seed(4))
    tokens, log_probs = draw(logits, draws(9, temperature=0.0))
    assert (tokens == logits.argmax(-1).numpy()).all()
    assert (log_probs == torch.log_softmax(logits, -1).max(-1).values.numpy()).all()


def test_banned_ids_are_never_drawn_and_do_not_change_log_probs():
    logits = torch.zeros(2000, 4)
    tokens, log_probs = draw(logits, draws(2000, banned=[(row, np.array([1, 3])) for row in range(0, 2000, 2)]))
    assert set(tokens[::2]) == {0, 2}
    assert set(tokens[1::2]) == {0, 1, 2, 3}
    np.testing.assert_allclose(log_probs, math.log(0.25), rtol=1e-6)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_an_error(value):
    logits = torch.zeros(3, 8)
    logits[1, 2] = value
    with pytest.raises(EngineError, match="not finite"):
        draw(logits, draws(3))


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"temperature": math.nan}, {"top_p": 0.0}, {"max_new_tokens": 0}, {"stop": ("",)}]
)
def test_impossible_parameters_are_refused(wrong):
    with pytest.raises(EngineError, match=next(iter(wrong))):
        check(SamplingParams(**wrong), "r")


@settings(max_examples=60, deadline=None)
@given(text=st.text("ab\N{EURO SIGN}\N{SNOWMAN}", max_size=30), stop=st.text("ab\N{EURO SIGN}", min_size=1, max_size=3))
def test_stop_strings_are_found_at_the_token_that_completes_them(text, stop):
    """Against searching the whole text after every token, with characters of three tokens each."""

    class Bytes:
        def decode(self, ids, skip_special_tokens):
            return bytes(ids).decode(errors="replace")

    ids = list(text.encode())
    watch = StopStrings(Bytes(), (stop, "\N{CHECK MARK}"), skip_special_tokens=False)
    hits = [watch.hit(token) for token in ids]
    first = next((i for i in range(len(ids)) if stop in bytes(ids[: i + 1]).decode(errors="replace")), None)
    assert (hits.index(True) if True in hits else None) == first
