"""The forward pass equals transformers' to rounding, and itself bit for bit in any batch, width or order of work."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from miles_local.decode import ROWS, Attention, Cache, Decoder, linear, round_up
from miles_local.weights import ModelShape, Weights, read_tensors

KINDS = ("dense", "tied", "moe", "moe-plain", "llama", "llama-tied", "mistral", "qwen2")
VOCAB = 96
LONG = 600


def make(models, kind, dtype=torch.float32):
    folder, reference = models[kind]
    shape = ModelShape.read(folder)
    return Decoder(shape, shape.context, dtype), Weights.from_stream(shape, dtype, read_tensors(folder)), reference


def random_ids(count, seed):
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def decode(decoder, weights, ids, prefilled, company=0, room=0, trace=False):
    """Logits [len(ids) - prefilled + 1, V] after each position from the prefill's last on, and the routing.

    `company` other sequences are prefilled and decoded alongside, `room` makes the cache wider.
    """
    others = [tuple(random_ids(1 + 7 * i % 40, seed=100 + i)) for i in range(company)]
    cache = Cache(256)
    cache.reserve(round_up(1 + company), max(len(ids), 41) + room)
    filled = decoder.prefill(weights, [*others, tuple(ids[:prefilled])], trace)
    order = torch.arange(1 + company).flip(0)  # ours goes to row 0, where it did not lie in the prefill
    cache.put(torch.arange(1 + company), order, filled)
    logits, routing = [filled.logits[-1]], [] if not trace else [*filled.routing[-1, :prefilled]]
    for position in range(prefilled, len(ids)):
        tokens = torch.zeros(round_up(1 + company), dtype=torch.int64)
        positions = torch.zeros_like(tokens)
        tokens[0], positions[0] = ids[position], position
        for row, other in enumerate(reversed(others), 1):
            tokens[row], positions[row] = position % VOCAB, len(other)
        got, experts = decoder.step(weights, cache, tokens, positions, trace)
        logits.append(got[0])
        if trace:
            routing.append(experts[0])
    return torch.stack(logits), torch.stack(routing) if trace else None


@torch.no_grad()
def check_rounding(got, reference, ids):
    """Logits [n, V] after the last n of `ids` are as near to those of float64 as transformers' own, times two."""
    wide = copy.deepcopy(reference).double()
    if hasattr(wide.config, "num_experts"):
        wide.set_experts_implementation("eager")  # the grouped product has no float64
    exact, theirs = (torch.log_softmax(model(torch.tensor([ids])).logits[0, -len(got):], -1)
                     for model in (wide, reference))
    assert exact.dtype == torch.float64
    allowed = 2 * (theirs - exact).abs().max()
    assert allowed < 1e-4
    assert (torch.log_softmax(got, -1) - exact).abs().max() <= allowed


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_equal_transformers_to_rounding(models, kind):
    """Prefill and steps against one full eager forward, float32, every kind of checkpoint."""
    decoder, weights, reference = make(models, kind)
    ids = random_ids(60, seed=1)
    got, _ = decode(decoder, weights, ids, prefilled=20, company=3)
    check_rounding(got, reference, ids)


def windowed(build, folder):
    """As `models`: the checkpoint whose window is wider than a chunk of keys and shorter than a long context."""
    return {"windowed": (folder, build("mistral", folder, sliding_window=300))}


@pytest.mark.parametrize("kind", ["dense", "windowed"])
def test_long_contexts_equal_transformers(models, build, tmp_path, kind):
    """Beyond one chunk of keys and one chunk of queries."""
    decoder, weights, reference = make(models if kind in models else windowed(build, tmp_path), kind)
    ids = random_ids(LONG, seed=2)
    got, _ = decode(decoder, weights, ids, prefilled=LONG - 3)
    check_rounding(got, reference, ids)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["dense", "moe", "llama", "mistral", "qwen2"])
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_bits_do_not_depend_on_company_width_or_prefill(models, kind, dtype, threads, data):
    """A sequence prefilled to anywhere, among any company, in any cache gives exactly the logits it gives alone."""
    decoder, weights, _ = make(models, kind, dtype)
    torch.set_num_threads(threads)
    length = data.draw(st.integers(3, 50))
    ids = random_ids(length, seed=length)
    alone, routing = decode(decoder, weights, ids, prefilled=1, trace=kind == "moe")
    prefilled = data.draw(st.integers(1, length))
    company, room = data.draw(st.integers(0, 40)), data.draw(st.integers(0, 300))
    other, other_routing = decode(decoder, weights, ids, prefilled, company, room, trace=kind == "moe")
    assert torch.equal(other, alone[prefilled - 1 :])
    assert kind != "moe" or torch.equal(other_routing, routing)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["dense", "windowed"])
def test_bits_do_not_depend_on_prefill_in_long_contexts(models, build, tmp_path, kind, dtype, threads):
    """The same where sums over keys are chunked: recomputing a long context gives the bits of decoding it."""
    torch.set_num_threads(threads)
    decoder, weights, _ = make(models if kind in models else windowed(build, tmp_path), kind, dtype)
    ids = random_ids(LONG, seed=3)
    start = 236
    stepwise, _ = decode(decoder, weights, ids[:266], prefilled=start, room=300)
    for end in (256, 257, 266):
        again, _ = decode(decoder, weights, ids[:end], prefilled=end, company=5)
        assert torch.equal(again[0], stepwise[end - start])
    late, _ = decode(decoder, weights, ids, prefilled=LONG - 20)
    again, _ = decode(decoder, weights, ids, prefilled=LONG, company=2)
    assert torch.equal(late[-1], again[0])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(512, 256), (256, 768), (8, 256), (1024, 1024), (256, 3072)])
def test_a_row_of_a_product_has_the_same_bits_among_any_number_of_rows(outputs, inputs, dtype, threads):
    """The shapes of real layers, where the libraries' own products depend on the count of rows."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(528, inputs, generator=generator).to(dtype)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    every = linear(x, weight)
    for rows in (ROWS, 32, 48, 64, 112, 128, 208, 272):
        assert torch.equal(linear(x[:rows].clone(), weight), every[:rows])
        assert torch.equal(linear(x[-rows:].clone(), weight), every[-rows:])


@pytest.mark.parametrize("experts", [2, 6, 10, 11, 60])
def test_a_row_of_a_routers_scores_has_the_same_bits_at_any_place(models, experts):
    """Scores of few experts: rows then begin off the libraries' vectors, each at another offset."""
    shape = replace(ModelShape.read(models["moe"][0]), experts=experts)
    router = Weights.random(shape, torch.float32).layers[0].router
    scores = linear(torch.randn(shape.hidden, generator=torch.Generator().manual_seed(0)).repeat(48, 1), router)
    assert (scores == scores[0]).all()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256])
def test_a_query_attends_with_the_same_bits_among_any_number_of_queries(head_dim, threads):
    """A decode step asks with as few as one query row per key head, a prefill with many."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(6, count, head_dim, generator=generator) for count in (64, 320, 320))
    many = Attention(6, 64, 320, 6, head_dim)(q, k, v, torch.zeros(320))
    for queries in (1, 2, 4, 7, 16):
        few = Attention(6, queries, 320, 6, head_dim)(q[:, :queries], k, v, torch.zeros(320))
        assert torch.equal(few, many[:, :queries])


def test_dense_layers_have_no_routing(models):
    """Layers without experts are filled with -1; the others name distinct experts."""
    decoder, weights, _ = make(models, "moe-plain")
    _, routing = decode(decoder, weights, random_ids(9, seed=4), prefilled=4, trace=True)
    assert routing.shape == (9, 2, 2)
    assert (routing[:, 0] == -1).all()
    assert (routing[:, 1] >= 0).all()
    assert (routing[:, 1, 0] != routing[:, 1, 1]).all()


@pytest.mark.parametrize("kind", ["moe", "moe-plain"])
def test_routing_equals_transformers_router(models, kind):
    """The sets of experts of every position and layer."""
    decoder, weights, reference = make(models, kind)
    ids = random_ids(30, seed=5)
    _, routing = decode(decoder, weights, ids, prefilled=10, trace=True)
    with torch.no_grad():
        router_logits = reference(torch.tensor([ids]), output_router_logits=True).router_logits
    layers = [1] if kind == "moe-plain" else [0, 1]
    for layer, scores in zip(layers, router_logits, strict=True):
        expected = scores.topk(2, -1).indices.sort(-1).values
        assert torch.equal(routing[:, layer].long().sort(-1).values, expected)
