"""The decoder for GPUs, on the CPU: the same code, but for the graphs. It is the CPU's decoder to rounding."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from miles_local import engine as engine_module
from miles_local.batch import Batch
from miles_local.decode import Cache, Decoder
from miles_local.device import DeviceDecoder, Graphs, row_bucket, width_bucket
from miles_local.engine import LocalEngine
from miles_local.placing import device_named
from miles_local.weights import ModelShape, Weights, read_tensors
from miles_testing.engines import engine_contract
from sessions import session, together

from miles_core.errors import EngineError
from miles_core.stages.rollout import Request, SamplingParams

KINDS = ("dense", "tied", "moe", "moe-plain", "llama", "llama-tied", "mistral", "qwen2")
CPU = torch.device("cpu")


def both(models, kind, dtype):
    """Decoders and weights of the CPU and of a GPU, and transformers' model."""
    folder, reference = models[kind]
    shape = ModelShape.read(folder)
    weights = Weights.from_stream(shape, dtype, read_tensors(folder))
    return Decoder(shape, shape.context, dtype), DeviceDecoder(shape, shape.context, dtype, CPU), weights, reference


@torch.inference_mode()
def logits_of(decoder, weights, contexts, fed, trace=False):
    """[U, 1 + F, V] logits after the contexts and after each token of `fed` [U, F], and the routing of all."""
    cache = Cache(32)
    cache.reserve(len(contexts), max(map(len, contexts)) + fed.shape[1])
    filled = decoder.prefill(weights, contexts, trace)
    each = torch.arange(len(contexts))
    cache.put(each, each, filled)
    rows = decoder.bucket(len(contexts), cache)
    parts, routes = [filled.logits], []
    if trace:
        routes += [filled.routing[place, : len(ids)] for place, ids in enumerate(contexts)]
    positions = torch.zeros(rows, dtype=torch.int64)
    positions[: len(contexts)] = torch.tensor([len(ids) for ids in contexts])
    for column in fed.T:
        tokens = torch.zeros(rows, dtype=torch.int64)
        tokens[: len(contexts)] = column
        got, experts = decoder.step(weights, cache, tokens, positions, trace)
        parts.append(got[: len(contexts)])
        if trace:
            routes.append(experts[: len(contexts)])
        positions[: len(contexts)] += 1
    return torch.stack(parts, 1), torch.cat(routes) if trace else None


def material(lengths=(5, 70, 23), more=6):
    generator = torch.Generator().manual_seed(3)
    contexts = [tuple(torch.randint(0, 96, (n,), generator=generator).tolist()) for n in lengths]
    return contexts, torch.randint(0, 96, (len(lengths), more), generator=generator)


@pytest.mark.parametrize("kind", KINDS)
def test_in_float32_logits_and_experts_are_those_of_the_cpu_decoder(models, kind):
    cpu, device, weights, _ = both(models, kind, torch.float32)
    trace = kind.startswith("moe")
    expected, routes = logits_of(cpu, weights, *material(), trace)
    got, ours = logits_of(device, weights, *material(), trace)
    assert (got - expected).abs().max() <= 2e-5 * expected.std()
    assert not trace or (ours == routes).all()


@pytest.mark.parametrize("kind", ["dense", "llama", "mistral", "qwen2"])
def test_in_bfloat16_it_is_as_near_to_float32_as_transformers(models, kind):
    """Log-probs of the tokens that follow; both round every product."""
    _, device, weights, reference = both(models, kind, torch.bfloat16)
    contexts, fed = material(lengths=(40,), more=16)
    got = torch.log_softmax(logits_of(device, weights, contexts, fed)[0][0], -1)
    ids = torch.tensor([[*contexts[0], *fed[0].tolist()]])
    with torch.no_grad():
        # The same rounded weights on all sides: what differs is the arithmetic.
        low = copy.deepcopy(reference).bfloat16()
        exact, theirs = (torch.log_softmax(model(ids).logits[0, 39:].float(), -1) for model in (
            copy.deepcopy(low).float(), low))
    assert (got - exact).abs().mean() <= 1.3 * (theirs - exact).abs().mean()


def request(index=0, length=5, **sampling):
    ids = np.random.default_rng(index).integers(0, 96, length).tolist()
    return Request(f"r{index}", tuple(ids), SamplingParams(**{"max_new_tokens": 12, **sampling}), key=1000 + index)


def engine_on_device(monkeypatch):
    """Have engines decode with the GPU's decoder, on the CPU."""
    def choose(folder, dtype, max_context, device, inputs):
        shape = ModelShape.read(folder)
        return DeviceDecoder(shape, max_context or shape.context, dtype, CPU), "device"

    monkeypatch.setattr(engine_module, "decoder_for", choose)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_engine_repeats_itself_and_scores_as_transformers(models, monkeypatch, dtype):
    engine_on_device(monkeypatch)
    folder, reference = models["dense"]
    requests = [request(i, 3 + i, temperature=0.5 + 0.2 * i, top_k=i or -1, top_p=1 - 0.1 * i) for i in range(5)]
    first, second = (session(together(requests), folder, dtype=dtype) for _ in range(2))
    for asked, one, two in zip(requests, first, second, strict=True):
        assert one.output_ids.tolist() == two.output_ids.tolist()
        assert (one.log_probs == two.log_probs).all()
        ids = torch.tensor([[*asked.input_ids, *one.output_ids.tolist()]])
        with torch.no_grad():
            logits = reference(ids).logits[0, len(asked.input_ids) - 1 : -1]
        expected = torch.log_softmax(logits / asked.sampling.temperature, -1).gather(
            1, ids[0, len(asked.input_ids):, None])[:, 0]
        assert np.abs(one.log_probs - expected.numpy()).max() <= (2e-5 if dtype == torch.float32 else 0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_keeps_the_contract_of_engines(models, monkeypatch, dtype):
    engine_on_device(monkeypatch)
    folder, model = models["tied"]

    def scaled(version):
        return [(name, tensor * (1 + 0.1 * version)) for name, tensor in model.named_parameters()]

    engine_contract(lambda: LocalEngine(folder, dtype=dtype, random_init=True), scaled, vocabulary=96, exact=False)


def test_new_weights_take_the_place_of_the_old_ones(models, build, monkeypatch, tmp_path):
    """Graphs have addresses: the tensors stay, what they hold changes."""
    engine_on_device(monkeypatch)
    other = build("dense", tmp_path, seed=7)

    async def body(engine):
        held = engine._weights
        before = await engine.generate(request(temperature=0.0))
        await engine.update_weights(other.state_dict().items(), 1)
        after = await engine.generate(request(temperature=0.0))
        return engine._weights is held, before, after

    same, before, after = session(body, models["dense"][0])
    fresh = session(lambda engine: engine.generate(request(temperature=0.0)), tmp_path)
    assert same and after.output_ids.tolist() == fresh.output_ids.tolist() != before.output_ids.tolist()


def test_what_is_released_comes_back_with_the_next_update(models, monkeypatch):
    engine_on_device(monkeypatch)
    folder, model = models["dense"]

    async def body(engine):
        before = await engine.generate(request(temperature=0.0))
        await engine.release(("kv_cache", "weights", "cuda_graph"))
        gone = engine._weights, engine._batch._cache.k
        await engine.occupy(("weights",))
        await engine.update_weights(model.state_dict().items(), 1)
        await engine.occupy(("kv_cache", "cuda_graph"))
        return before, gone, await engine.generate(request(temperature=0.0))

    before, gone, after = session(body, folder)
    assert gone == (None, [])
    assert after.output_ids.tolist() == before.output_ids.tolist()


def test_requests_wait_for_room_in_a_bounded_cache(models, monkeypatch):
    """Rows are taken for the longest answers; those that wait get the same answers, later."""
    engine_on_device(monkeypatch)
    requests = [request(i, 5, max_new_tokens=40) for i in range(40)]
    free = session(together(requests), models["dense"][0])
    sizes = []
    admit = Batch.admit

    def watched(self, seqs, *rest):
        ended = admit(self, seqs, *rest)
        sizes.append((self._cache.rows * self._cache.width, len(self.seqs)))
        return ended

    monkeypatch.setattr(Batch, "admit", watched)
    monkeypatch.setattr(engine_module, "cache_tokens", lambda device, token_bytes: 1024)
    tight = session(together(requests), models["dense"][0])
    assert max(sizes) == (1024, 16)  # 16 rows of 64
    assert [one.output_ids.tolist() for one in tight] == [one.output_ids.tolist() for one in free]


def test_a_cache_lasts_until_its_shape_is_in_the_way(models, monkeypatch):
    """Graphs last as long. Then what is too wide for the rows of before gets fewer."""
    engine_on_device(monkeypatch)
    monkeypatch.setattr(engine_module, "cache_tokens", lambda device, token_bytes: 4096)
    short, long = [request(i, 5, max_new_tokens=20) for i in range(100)], [request(0, 5, max_new_tokens=200)]

    async def body(engine):
        cache, shapes = engine._batch._cache, []
        for requests in (short, short, long):
            await together(requests)(engine)
            shapes.append((cache.layout, cache.rows, cache.width))
        return shapes

    first, second, third = session(body, models["dense"][0])
    assert first == second and first[1:] == (64, 64)
    assert third[0] > second[0] and third[1:] == (16, 256)


def test_buckets_hold_what_they_are_asked_for():
    for count in range(1, 300):
        assert count <= row_bucket(count, 320) <= max(16, 2 * count)
        assert row_bucket(count, 48) <= 48
    widths = {width_bucket(count, 4096) for count in range(1, 4097)}
    assert widths == {128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096}
    assert all(count <= width_bucket(count, 4096) for count in range(1, 4097))


def test_where_a_capture_fails_steps_go_on_and_one_line_says_so(caplog):
    """Without CUDA every capture fails."""
    graphs, calls = Graphs(CPU), []

    def step(tokens, positions, width):
        calls.append(width)
        return tokens[:, None].float()

    cache = SimpleNamespace(rows=16, layout=1)
    for _ in range(3):
        got = graphs.run(step, (None, cache), torch.arange(16), torch.zeros(16, dtype=torch.int64), 128)
        assert got[:, 0].tolist() == list(range(16))
    assert graphs.failed and len([record for record in caplog.records if "CUDA graphs" in record.message]) == 1


def test_without_a_gpu_auto_is_the_cpu_and_cuda_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_named("auto") == device_named("cpu") == CPU
    with pytest.raises(EngineError) as caught:
        device_named("cuda")
    assert (caught.value.code, caught.value.who) == ("engine-device-missing", "--engine-device")
