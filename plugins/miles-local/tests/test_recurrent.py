"""Rows whose past is a state: whatever happens to them, their log-probs are those of a full forward."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from miles_local.decode import Cache, Prefill
from miles_local.engine import LocalEngine
from miles_local.recurrent import States, by_length
from transformers import AutoConfig, AutoModelForCausalLM

from miles_core.stages.rollout import Request, SamplingParams

TINY = {
    "vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 80, "max_position_embeddings": 256, "initializer_range": 0.1,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"], "rms_norm_eps": 1e-2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8,
    "num_experts": 0, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder, transformers model)."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_next", **TINY), dtype=torch.float32).eval()
    folder = tmp_path_factory.mktemp("qwen3_next")
    model.save_pretrained(folder)
    return folder, model


def request(name, length, tokens, seed=None):
    ids = np.random.default_rng(length if seed is None else seed).integers(0, 96, length).tolist()
    return Request(name, tuple(ids), SamplingParams(max_new_tokens=tokens), key=31 * length + tokens)


def gap(model, asked, answer):
    """Largest difference of a log-prob from a full forward's."""
    ids = [*asked.input_ids, *answer.output_ids.tolist()]
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, len(asked.input_ids) - 1 : -1].float()
    expected = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(answer.output_ids).long()[:, None])[:, 0]
    return float(np.abs(answer.log_probs - expected.numpy()).max())


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_log_probs_are_a_full_forwards_whatever_happens_to_the_rows(made, mode):
    """Unequal lengths, one token upwards; rows that end and are replaced; twins at once, later, and after a pause;
    a neighbour that is cancelled; caches that are dropped and computed anew."""
    folder, model = made
    first = [request(f"a{i}", 1 + 3 * i, 5 + 7 * (i % 3)) for i in range(6)]
    twins = [Request(f"t{i}", first[3].input_ids, SamplingParams(max_new_tokens=24), key=50 + i) for i in range(4)]

    async def run():
        engine = LocalEngine(folder, max_batch=5)
        async with asyncio.timeout(60):
            await engine.start()
            try:
                doomed = asyncio.ensure_future(engine.generate(request("doomed", 20, 200)))
                tasks = [asyncio.ensure_future(engine.generate(one)) for one in [*first, *twins[:2]]]
                for late in twins[2:]:
                    await asyncio.sleep(0.02)
                    await engine.pause(mode)
                    tasks.append(asyncio.ensure_future(engine.generate(late)))
                    await engine.resume()
                doomed.cancel()
                return await asyncio.gather(*tasks)
            finally:
                await engine.stop()

    asked = [*first, *twins]
    answers = asyncio.run(run())
    assert [len(one.output_ids) for one in answers] == [one.sampling.max_new_tokens for one in asked]
    assert max(gap(model, one, answer) for one, answer in zip(asked, answers, strict=True)) <= 1e-5


def test_a_twin_of_a_row_that_has_gone_on_is_computed_anew(made):
    """Its row's state has taken in what was drawn since: a copy of it would answer another question."""
    folder, model = made
    one, other = request("one", 9, 60), request("other", 9, 10)

    async def run():
        engine = LocalEngine(folder, max_batch=4)
        async with asyncio.timeout(60):
            await engine.start()
            try:
                task = asyncio.ensure_future(engine.generate(one))
                while not engine._batch or engine._batch._of["drawn"][0] < 5:
                    await asyncio.sleep(0.001)
                answer = await engine.generate(other)
                assert not task.done()
                return await task, answer
            finally:
                await engine.stop()

    assert one.input_ids == other.input_ids
    for asked, answer in zip((one, other), asyncio.run(run()), strict=True):
        assert gap(model, asked, answer) <= 1e-5


def test_a_cache_moves_states_with_their_rows():
    def prefill(value):
        keys = [torch.full((2, 1, 16, 4), float(value))]
        return Prefill(torch.empty(0), keys, keys, {("conv", 0, 0): torch.tensor([[value], [value + 1]])})

    cache = Cache(64)
    cache.reserve(2, 8)
    cache.put(torch.tensor([0, 1]), torch.tensor([1, 0]), prefill(5))
    cache.reserve(40, 100)  # grows
    cache.put(torch.tensor([2]), torch.tensor([0]), prefill(9))
    cache.copy(torch.tensor([2]), torch.tensor([0]))
    assert cache.states["conv", 0, 0][:4, 0].tolist() == [9, 5, 9, 0]
    cache.clear()
    assert not cache.states


def test_a_convolution_keeps_its_last_inputs():
    key, new = ("conv", 0, 0), torch.arange(1.0, 7).view(1, 1, 6)
    first = States(None, 1)
    assert first.get(key) is None
    assert first.push(key, new[..., :2], 4).tolist() == [[[0, 0, 1, 2]]]
    kept = {key: torch.cat([first.tensors[key], torch.zeros(2, 1, 4)])}  # three rows, of which one is fed
    assert States(kept, 1).push(key, new[..., 2:3], 4).tolist() == [[[0, 0, 1, 2, 3]]]
    assert kept[key].tolist() == [[[0, 1, 2, 3]], [[0] * 4], [[0] * 4]]


def test_sequences_of_equal_length_are_computed_at_once_and_come_back_in_order():
    seen = []

    def compute(equal):
        seen.append([len(ids) for ids in equal])
        ids = torch.tensor(equal, dtype=torch.float32)
        return Prefill(ids[:, -1:], [ids[:, None, :, None]], [], {("recurrent", 0, 0): ids.sum(1, keepdim=True)},
                       ids[:, :, None, None].to(torch.int16))

    whole = by_length([(1, 2, 3), (4,), (5, 6, 7), (8, 9)], compute)
    assert seen == [[3, 3], [1], [2]]
    assert whole.logits[:, 0].tolist() == [3, 4, 7, 9]
    assert whole.k[0][:, 0, :, 0].tolist() == [[1, 2, 3], [4, 0, 0], [5, 6, 7], [8, 9, 0]]
    assert whole.states["recurrent", 0, 0][:, 0].tolist() == [6, 4, 18, 17]
    assert whole.routing[:, :, 0, 0].tolist() == [[1, 2, 3], [4, -1, -1], [5, 6, 7], [8, 9, -1]]
