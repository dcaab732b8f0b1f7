"""The asynchronous contract: the same bits under any timing, atomic weights, nothing hangs, nothing is stale."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from miles_local.decode import Decoder
from miles_local.engine import LocalEngine
from sessions import session, together

from miles_core.errors import CheckpointError, EngineError
from miles_core.stages.rollout import Request, SamplingParams

VOCAB = 96


def request(index=0, length=5, **sampling):
    rng = np.random.default_rng(index)
    ids = tuple(rng.integers(0, VOCAB, length).tolist())
    return Request(f"r{index}", ids, SamplingParams(**{"max_new_tokens": 12, **sampling}), key=1000 + index)


def stream(model):
    """The (name on disk, tensor) pairs of a transformers model: experts one by one."""
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            yield name, tensor
            continue
        prefix, part = name.rsplit(".", 1)
        for expert, matrix in enumerate(tensor):
            if part == "down_proj":
                yield f"{prefix}.{expert}.down_proj.weight", matrix
            else:
                gate, up = matrix.chunk(2)
                yield f"{prefix}.{expert}.gate_proj.weight", gate
                yield f"{prefix}.{expert}.up_proj.weight", up


def same(left, right):
    """Bit equality of two answers, the versions excepted."""
    assert left.output_ids.tolist() == right.output_ids.tolist()
    assert (left.log_probs == right.log_probs).all()
    assert left.finish_reason == right.finish_reason
    assert left.text == right.text
    assert left.extra.keys() == right.extra.keys()
    assert all((left.extra[name] == right.extra[name]).all() for name in left.extra)


async def drawn(engine, count):
    """Wait until some running request has drawn `count` tokens."""
    while not any(len(engine._batch) and engine._batch._of["drawn"][row] >= count for row in range(len(engine._batch))):
        await asyncio.sleep(0.001)


# Draws and bits.


KINDS = ("dense", "tied", "moe", "moe-plain", "llama", "llama-tied", "mistral", "qwen2")


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_equal_transformers_at_any_temperature(models, kind):
    """What is returned is log_softmax(logits / temperature), whatever top-k and top-p cut."""
    folder, reference = models[kind]
    requests = [request(i, 3 + i, temperature=0.5 + 0.4 * i, top_k=i or -1, top_p=1 - 0.1 * i) for i in range(4)]
    for asked, answer in zip(requests, session(together(requests), folder), strict=True):
        ids = [*asked.input_ids, *answer.output_ids.tolist()]
        with torch.no_grad():
            logits = reference(torch.tensor([ids])).logits[0, len(asked.input_ids) - 1 : -1].float()
        expected = torch.log_softmax(logits / asked.sampling.temperature, -1)
        drawn_ones = expected.gather(1, torch.tensor(ids[len(asked.input_ids) :])[:, None])[:, 0]
        assert np.abs(answer.log_probs - drawn_ones.numpy()).max() <= 2e-5
        assert (answer.finish_reason, len(answer.output_ids), set(answer.versions)) == ("length", 12, {0})


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_are_those_of_generate(models, kind):
    """Beyond the window where there is one."""
    folder, reference = models[kind]
    requests = [request(i, length, temperature=0.0) for i, length in enumerate((3, 17, 8))]
    for asked, answer in zip(requests, session(together(requests), folder), strict=True):
        whole = reference.generate(torch.tensor([asked.input_ids]), max_new_tokens=12, do_sample=False)
        assert answer.output_ids.tolist() == whole[0, len(asked.input_ids) :].tolist()


@pytest.mark.parametrize(("kind", "dtype", "threads"), [
    ("llama", torch.float32, 1), ("mistral", torch.bfloat16, 2), ("qwen2", torch.float32, 1),
    ("dense", torch.float32, 1), ("dense", torch.bfloat16, 1), ("moe", torch.float32, 1), ("moe", torch.bfloat16, 1),
    ("moe", torch.float32, 2), ("dense", torch.bfloat16, 2),
])  # fmt: skip
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_timing_and_any_mix_give_the_same_bits(models, kind, dtype, threads, data):
    """Arrivals, batch size, shared prompts, retractions and cancelled neighbours are random; answers are equal (==)."""
    torch.set_num_threads(threads)
    folder, _ = models[kind]
    want = frozenset(["routed_experts"] if kind == "moe" else [])
    count = data.draw(st.integers(2, 24))
    prompts = data.draw(st.lists(st.integers(1, 40), min_size=count, max_size=count))  # equal numbers: equal prompts
    news = data.draw(st.lists(st.integers(1, 20), min_size=count, max_size=count))
    delays = data.draw(st.lists(st.sampled_from([0, 0, 0.002, 0.01]), min_size=count, max_size=count))
    retracts, max_batch = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 24))
    requests = [
        replace(request(p, p, max_new_tokens=news[i], top_p=1 - i % 2 / 10), id=f"x{i}", key=i, want=want)
        for i, p in enumerate(prompts)
    ]

    async def busy(engine):
        async def late(one, delay):
            await asyncio.sleep(delay)
            return await engine.generate(one)

        tasks = [asyncio.create_task(late(*pair)) for pair in zip(requests, delays, strict=True)]
        neighbour = asyncio.create_task(engine.generate(request(77, max_new_tokens=500)))
        for _ in range(retracts):
            await asyncio.sleep(0.004)
            await engine.pause("retract")
            await engine.resume()
        neighbour.cancel()
        return await asyncio.gather(*tasks)

    async def alone(engine):
        return [await engine.generate(requests[i]) for i in range(min(3, count))]

    crowded = session(busy, folder, dtype=dtype, max_batch=max_batch)
    for left, right in zip(crowded, session(alone, folder, dtype=dtype)):
        same(left, right)


def test_a_key_reproduces_and_another_key_differs(models):
    folder, _ = models["dense"]
    one = request(1, max_new_tokens=40)
    first, again = (session(together([one]), folder)[0] for _ in range(2))
    same(first, again)
    other = session(together([replace(one, key=5)]), folder)[0]
    assert other.output_ids.tolist() != first.output_ids.tolist()


def test_a_group_shares_one_prefill(models, monkeypatch):
    """Eight samples of each of three prompts: three sequences are prefilled, in one pass."""
    folder, _ = models["dense"]
    seen = []

    async def body(engine):
        prefill = engine._decoder.prefill
        monkeypatch.setattr(engine._decoder, "prefill", lambda *a: seen.append(len(a[1])) or prefill(*a))
        return await together([replace(request(i // 8), id=f"{i}", key=i) for i in range(24)])(engine)

    answers = session(body, folder)
    assert seen == [3]
    assert len({tuple(a.output_ids) for a in answers[:8]}) > 1


@pytest.fixture
def prefilled(monkeypatch):
    """Numbers of sequences that were prefilled, call after call."""
    seen = []
    prefill = Decoder.prefill

    def spying(self, weights, sequences, *rest):
        seen.append(len(sequences))
        return prefill(self, weights, sequences, *rest)

    monkeypatch.setattr(Decoder, "prefill", spying)
    return seen


@pytest.mark.parametrize(("kind", "dtype"), [("dense", torch.float32), ("moe", torch.float32), ("moe", torch.bfloat16)])
def test_a_latecomer_copies_the_prompt_of_a_running_twin(models, prefilled, kind, dtype):
    """Room for three of twelve: the prompt is computed once, and tokens, log-probs and experts are those of alone."""
    folder, _ = models[kind]
    want = frozenset(["routed_experts"] if kind == "moe" else [])
    asked = [
        replace(request(3, 9, max_new_tokens=8 + 3 * i), id=f"{i}", key=i, want=want) for i in range(12)
    ]  # of unequal lengths, so that there is always a twin left
    answers = session(together(asked), folder, max_batch=3, dtype=dtype)
    assert prefilled == [1]
    prefilled.clear()
    for one, answer in zip(asked, answers, strict=True):
        same(answer, session(together([one]), folder, dtype=dtype)[0])
    assert prefilled == [1] * 12


def test_a_twin_of_older_weights_is_never_copied(models, build, tmp_path, prefilled):
    """Updated in place, the running row keeps its cache; requests with its prompt get one by the new weights."""
    folder, _ = models["dense"]
    new = build("dense", tmp_path, seed=1)

    async def body(engine):
        old = asyncio.create_task(engine.generate(request(1, max_new_tokens=300)))
        await drawn(engine, 5)
        await engine.pause("in_place")
        await engine.update_weights(stream(new), 1)
        await engine.resume()
        young = [await engine.generate(replace(request(1, max_new_tokens=5), id="young"))]
        first = asyncio.create_task(engine.generate(replace(request(1, max_new_tokens=200), id="first")))
        await drawn(engine, 2)
        young.append(await engine.generate(replace(request(1, max_new_tokens=5), id="twin")))
        await engine.abort()
        await asyncio.gather(old, first)
        return young

    answers = session(body, folder)
    assert prefilled == [1, 1, 1]  # old, young and first; the last copied from first
    for answer in answers:
        same(answer, session(together([request(1, max_new_tokens=5)]), tmp_path)[0])


def test_retracted_twins_keep_the_experts_that_their_tokens_were_drawn_with(models, build, tmp_path):
    """After an update a group is computed anew, and the routing of positions from before stays what it was."""
    folder, _ = models["moe"]
    new = build("moe", tmp_path, seed=1)
    asked = [replace(request(2, 6, max_new_tokens=40), id=f"{i}", key=i, want=frozenset(["routed_experts"]))
             for i in range(3)]  # fmt: skip

    async def body(engine):
        tasks = [asyncio.create_task(engine.generate(one)) for one in asked]
        await drawn(engine, 5)
        await engine.update_weights(stream(new), 1)
        return await asyncio.gather(*tasks)

    for one, answer in zip(asked, session(body, folder), strict=True):
        undisturbed = session(together([one]), folder)[0]
        computed = 6 + int((answer.versions == 0).sum()) - 1
        before = answer.extra["routed_experts"][:computed]
        assert (before == undisturbed.extra["routed_experts"][:computed]).all()


def test_admission_is_first_come_first_served(models):
    """With room for two, ten requests end in the order in which they came."""
    folder, _ = models["dense"]
    ended = []

    async def body(engine):
        async def one(index):
            await engine.generate(request(index, max_new_tokens=3))
            ended.append(index)

        await asyncio.gather(*(one(index) for index in range(10)))

    session(body, folder, max_batch=2)
    assert [sorted(ended[i : i + 2]) for i in range(0, 10, 2)] == [[i, i + 1] for i in range(0, 10, 2)]


# How a response ends.


def test_stop_ids_eos_and_min_new_tokens(models, build, tmp_path):
    """Stop ids stay in, min_new_tokens delays all ends, ignore_eos passes them; generation_config may list several."""
    build("dense", tmp_path, eos_token_id=[3, 4])
    everything = tuple(range(2, VOCAB))  # only 0, 1 do not stop
    asked = [
        request(1, max_new_tokens=30, stop_token_ids=everything),
        request(2, max_new_tokens=30, stop_token_ids=everything, min_new_tokens=6),
        request(3, max_new_tokens=300),
        request(4, max_new_tokens=300, ignore_eos=True, stop_token_ids=(5,)),
    ]
    stop, late, eos, on = session(together(asked), tmp_path)
    assert stop.finish_reason == late.finish_reason == eos.finish_reason == "stop"
    assert set(late.output_ids[:6]) <= {0, 1}
    assert eos.output_ids[-1] in (3, 4)
    assert not set(eos.output_ids[:-1]) & {3, 4}
    assert on.finish_reason == "length"
    assert {5} < set(on.output_ids) and set(on.output_ids) & {3, 4}


def test_stop_strings_end_a_response_and_stay_in_its_text(models, tokenizer):
    folder, _ = models["dense"]
    free = session(together([request(6, max_new_tokens=40)]), folder, tokenizer=tokenizer)[0]
    stop = free.text[7:10]
    ended = session(together([request(6, max_new_tokens=40, stop=(stop,))]), folder, tokenizer=tokenizer)[0]
    assert ended.finish_reason == "stop"
    assert stop in ended.text
    assert stop not in tokenizer.decode(ended.output_ids[:-1].tolist())
    assert free.output_ids[: len(ended.output_ids)].tolist() == ended.output_ids.tolist()


def test_a_stop_string_that_began_in_an_earlier_request_ends_the_response(models, tokenizer):
    folder, _ = models["dense"]
    whole = request(6, max_new_tokens=40)
    free = session(together([whole]), folder, tokenizer=tokenizer)[0]
    begun = tuple(free.output_ids[:9].tolist())
    later = replace(whole, input_ids=whole.input_ids + begun, sampling=replace(whole.sampling, temperature=0))
    rest = session(together([later]), folder, tokenizer=tokenizer)[0].output_ids.tolist()
    stop = tokenizer.decode([begun[-1], rest[0]])
    assert stop not in tokenizer.decode(rest) and stop not in tokenizer.decode(begun)
    later = replace(later, resumed=begun, sampling=replace(later.sampling, stop=(stop,)))
    ended = session(together([later]), folder, tokenizer=tokenizer)[0]
    assert ended.output_ids.tolist() == rest[:1] and ended.finish_reason == "stop"


def test_the_context_bounds_a_response(models):
    folder, _ = models["dense"]
    answer = session(together([request(1, 30, max_new_tokens=50)]), folder, max_context=37)[0]
    assert (len(answer.output_ids), answer.finish_reason) == (7, "length")


@pytest.mark.parametrize(("change", "message"), [
    ({"input_ids": tuple(range(40))}, r"no room in a context of 37 tokens \(got a prompt of 40 tokens\).*Fix"),
    ({"input_ids": ()}, "no room"),
    ({"input_ids": (1, VOCAB)}, r"\[token-ids-out-of-range\]"),
    ({"want": frozenset(["routed_experts"])}, r"\[routed-experts-unavailable\]"),
    ({"want": frozenset(["hidden_states"])}, r"hidden_states.*\[engine-feature-missing\]"),
    ({"sampling": SamplingParams(stop=("x",))}, "no tokenizer"),
    ({"sampling": SamplingParams(top_p=0)}, "top_p"),
])  # fmt: skip
def test_impossible_requests_are_refused_and_the_engine_goes_on(models, change, message):
    folder, _ = models["dense"]

    async def body(engine):
        with pytest.raises(EngineError, match=message):
            await engine.generate(replace(request(), **change))
        assert len((await engine.generate(request())).output_ids) == 12

    session(body, folder, max_context=37)


def test_an_id_cannot_be_in_flight_twice(models):
    folder, _ = models["dense"]

    async def body(engine):
        first = asyncio.create_task(engine.generate(request(max_new_tokens=20)))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="already in flight"):
            await engine.generate(request())
        await first
        await engine.generate(request())

    session(body, folder)


def test_routed_experts_cover_all_positions_but_the_last(models):
    folder, _ = models["moe"]
    asked = [replace(request(i, 4 + i), want=frozenset(["routed_experts"])) for i in range(3)] + [request(9)]
    answers = session(together(asked), folder)
    for one, answer in zip(asked[:3], answers[:3], strict=True):
        routed = answer.extra["routed_experts"]
        assert (routed.dtype, routed.shape) == (np.int32, (len(one.input_ids) + 12 - 1, 2, 2))
        assert ((routed >= 0) & (routed < 6)).all()
    assert answers[3].extra == {}


# Control.


def test_abort_returns_what_was_drawn(models):
    """One by id, then all, those that wait for room included; the prefix equals the unaborted response's."""
    folder, _ = models["dense"]

    async def body(engine):
        tasks = [asyncio.create_task(engine.generate(request(i, max_new_tokens=600))) for i in range(4)]
        await drawn(engine, 5)
        await engine.abort(["r0", "unknown"])
        first = await tasks[0]
        await engine.abort()
        return [first, *await asyncio.gather(*tasks[1:]), await engine.generate(request(0, max_new_tokens=600))]

    first, *others, whole = session(body, folder, max_batch=2)
    assert {first.finish_reason, *(other.finish_reason for other in others)} == {"abort"}
    assert 5 <= len(first.output_ids) < 600
    assert len(others[-1].output_ids) == 0
    assert whole.output_ids[: len(first.output_ids)].tolist() == first.output_ids.tolist()


def test_cancelling_a_call_frees_its_row(models):
    folder, _ = models["dense"]

    async def body(engine):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await engine.generate(request(max_new_tokens=100_000))
        answer = await engine.generate(replace(request(), id="next"))
        assert len(engine._batch) == 0
        return answer

    assert len(session(body, folder, max_batch=1, max_context=100_000).output_ids) == 12


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_pause_draws_nothing_and_resume_changes_no_bit(models, mode):
    folder, _ = models["moe"]
    asked = [replace(request(i, max_new_tokens=60), want=frozenset(["routed_experts"])) for i in range(3)]

    async def body(engine):
        tasks = [asyncio.create_task(engine.generate(one)) for one in asked]
        await drawn(engine, 5)
        await engine.pause(mode)
        before = [len(f.ids) for f in engine._everyone()], engine._batch._of["drawn"].tolist()
        tasks.append(asyncio.create_task(engine.generate(request(8))))
        await asyncio.sleep(0.05)
        assert ([len(f.ids) for f in engine._everyone()][:3], engine._batch._of["drawn"].tolist()) == before
        assert not any(task.done() for task in tasks)
        await engine.resume()
        return await asyncio.gather(*tasks)

    for left, right in zip(session(body, folder), session(together([*asked, request(8)]), folder), strict=True):
        same(left, right)


def test_pause_abort_ends_everything_and_later_requests_wait(models):
    folder, _ = models["dense"]

    async def body(engine):
        running = asyncio.create_task(engine.generate(request(max_new_tokens=600)))
        await drawn(engine, 2)
        await engine.pause("abort")
        assert (await running).finish_reason == "abort"
        later = asyncio.create_task(engine.generate(request(1)))
        await asyncio.sleep(0.02)
        assert not later.done()
        await engine.resume()
        assert len((await later).output_ids) == 12

    session(body, folder)


# Weights.


@pytest.mark.parametrize("kind", ["dense", "tied", "moe", "llama", "llama-tied", "qwen2"])
def test_an_update_in_flight_recomputes_caches_and_marks_versions(models, build, tmp_path, kind):
    """Tokens after the update are those that the new weights give for prompt + tokens drawn before, bit for bit."""
    folder, _ = models[kind]
    new = build(kind, tmp_path, seed=1)
    asked = request(1, max_new_tokens=200, temperature=0.0)

    async def body(engine):
        task = asyncio.create_task(engine.generate(asked))
        await drawn(engine, 5)
        await engine.update_weights(stream(new), 3)
        return await task

    answer = session(body, folder)
    split = int((answer.versions == 0).sum())
    assert 5 <= split < 200
    assert answer.versions.tolist() == [0] * split + [3] * (200 - split)
    context = (*asked.input_ids, *answer.output_ids[:split].tolist())
    rest = Request("rest", context, replace(asked.sampling, max_new_tokens=200 - split), key=0)
    expected = session(together([rest]), tmp_path)[0]
    assert answer.output_ids[split:].tolist() == expected.output_ids.tolist()
    assert (answer.log_probs[split:] == expected.log_probs).all()


def test_an_update_paused_in_place_keeps_caches_of_running_requests_only(models, build, tmp_path):
    """The running request goes on over its old cache; a new one with the same prompt sees the new weights alone."""
    folder, _ = models["dense"]
    new = build("dense", tmp_path, seed=1)

    async def body(engine):
        task = asyncio.create_task(engine.generate(request(1, max_new_tokens=100)))
        await drawn(engine, 5)
        await engine.pause("in_place")
        await engine.update_weights(stream(new), 1)
        fresh = asyncio.create_task(engine.generate(replace(request(1), id="fresh")))
        await engine.resume()
        return await task, await fresh

    running, fresh = session(body, folder)
    assert sorted(set(running.versions)) == [0, 1]
    assert set(fresh.versions) == {1}
    same(fresh, session(together([request(1)]), tmp_path)[0])


@pytest.mark.parametrize(("edit", "message"), [
    (lambda t: t.pop("model.norm.weight"), "1 of .* missing, such as model.norm.weight"),
    (lambda t: t.update({"model.extra.weight": torch.zeros(2)}), "unknown tensor.*model.extra.weight"),
    (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), r"has the wrong shape, expected \[48\]"),
    (lambda t: t.update({"model.norm.weight": torch.full((48,), torch.nan)}), "not finite"),
])  # fmt: skip
def test_a_bad_update_changes_nothing(models, build, tmp_path, edit, message):
    folder, _ = models["moe"]
    tensors = dict(stream(build("moe", tmp_path, seed=1)))
    edit(tensors)

    async def body(engine):
        with pytest.raises(EngineError, match=message):
            await engine.update_weights(tensors.items(), 1)
        assert engine.version == 0
        return await engine.generate(request(2))

    same(session(body, folder), session(together([request(2)]), folder)[0])


@pytest.mark.parametrize("kind", ["moe", "through transformers"])
def test_weights_in_a_plugins_format_pass_its_hook_first(models, build, tmp_path, kind):
    """Both those of an update and those on disk, on both paths."""
    changes = {"hidden_act": "gelu"} if kind != "moe" else {}
    model = build("moe" if not changes else "dense", tmp_path, **changes)
    plain = dict(stream(model))

    def doubled():
        return ((f"packed.{name}", 2 * tensor) for name, tensor in plain.items())

    def halved(weights):
        for name, tensor in weights:
            yield name.removeprefix("packed."), tensor / 2

    async def body(engine):
        await engine.update_weights(doubled(), 1)
        return await engine.generate(request(2))

    expected = session(together([request(2)]), tmp_path)[0]
    same(session(body, tmp_path, incoming=halved, random_init=True), expected)
    on_disk = session(together([request(2)]), tmp_path, incoming=lambda weights: ((n, 2 * t) for n, t in weights))[0]
    assert not (on_disk.log_probs == expected.log_probs).all(), "what is on disk passes it, too"
    with pytest.raises(EngineError, match="packed"):
        session(body, tmp_path, random_init=True)


def test_versions_must_increase(models):
    folder, model = models["dense"]

    async def body(engine):
        await engine.update_weights(stream(model), 2)
        for version in (2, 1):
            with pytest.raises(EngineError, match="newer than version 2"):
                await engine.update_weights(stream(model), version)
        assert set((await engine.generate(request())).versions) == {2}

    session(body, folder)


# Failure and end.


def test_a_failure_in_the_thread_fails_every_call(models, monkeypatch):
    """In flight, waiting and later calls alike, each with the cause; stop returns, start serves again."""
    folder, _ = models["dense"]

    async def body(engine):
        tasks = [asyncio.create_task(engine.generate(request(i, max_new_tokens=600))) for i in range(3)]
        await drawn(engine, 2)
        with monkeypatch.context() as patch:
            patch.setattr(engine._decoder, "step", lambda *a: 1 / 0)
            errors = await asyncio.gather(*tasks, return_exceptions=True)
        for call in (engine.generate(request()), engine.abort(), engine.pause(), engine.update_weights([], 9)):
            with pytest.raises(EngineError, match="ZeroDivisionError") as caught:
                await call
            errors.append(caught.value)
        assert all(isinstance(e, EngineError) and isinstance(e.__cause__, ZeroDivisionError) for e in errors)
        await engine.stop()
        await engine.start()
        return await engine.generate(request())

    same(session(body, folder, max_batch=2), session(together([request()]), folder)[0])


def test_a_failure_while_answering_does_not_hang_the_call(models):
    """A tokenizer that raises, after the row has left the batch."""

    class Broken:
        def decode(self, ids, skip_special_tokens):
            raise RuntimeError("no text today")

    async def body(engine):
        with pytest.raises(EngineError, match="no text today"):
            await engine.generate(request())

    session(body, models["dense"][0], tokenizer=Broken())


def test_stop_ends_requests_as_aborted_in_bounded_time(models):
    folder, _ = models["dense"]

    async def body(engine):
        with pytest.raises(EngineError, match="not running"):
            await LocalEngine(folder).generate(request())
        tasks = [asyncio.create_task(engine.generate(request(i, max_new_tokens=600))) for i in range(3)]
        await drawn(engine, 2)
        began = time.monotonic()
        await engine.stop()
        assert time.monotonic() - began < 10
        assert [task.finish_reason for task in await asyncio.gather(*tasks)] == ["abort"] * 3
        with pytest.raises(EngineError, match="not running"):
            await engine.generate(request())

    session(body, folder, max_batch=2)


def test_the_event_loop_stays_free(models):
    """While requests decode, the loop goes on turning."""
    turns = 0

    async def body(engine):
        nonlocal turns
        task = asyncio.gather(*(engine.generate(request(i, max_new_tokens=60)) for i in range(16)))
        while not task.done():
            await asyncio.sleep(0)
            turns += 1

    session(body, models["dense"][0])
    assert turns > 100


def test_random_weights_need_no_checkpoint_files(models, build, tmp_path):
    build("dense", tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    first, again = (session(together([request()]), tmp_path, random_init=True)[0] for _ in range(2))
    same(first, again)
    with pytest.raises(CheckpointError, match="safetensors"):
        session(together([request()]), tmp_path)


@pytest.mark.parametrize(("kind", "changes", "path"), [
    ("dense", {}, "qwen3 fast path"), ("moe", {}, "qwen3_moe fast path"),
    ("dense", {"hidden_act": "gelu"}, "qwen3 through transformers"),
    ("dense", {"attention_bias": True}, "qwen3 fast path"), ("llama", {}, "llama fast path"),
    ("mistral", {}, "mistral fast path"), ("qwen2", {}, "qwen2 fast path"),
    ("llama", {"mlp_bias": False, "hidden_act": "relu"}, "llama through transformers"),
])  # fmt: skip
def test_the_path_is_named(build, tmp_path, kind, changes, path):
    """A variant that the fast path does not compute goes through transformers."""
    build(kind, tmp_path, **changes)
    assert LocalEngine(tmp_path).path == path


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="config.json"):
        LocalEngine(tmp_path)


def test_small_models_decode_on_one_thread_and_leave_the_others_theirs(models):
    """The count of threads is the worker's own: neither this thread nor one that starts later has it."""
    torch.set_num_threads(2)
    seen = {}

    async def body(engine):
        step = engine._decoder.step

        def spying(*arguments):
            seen["worker"] = torch.get_num_threads()
            return step(*arguments)

        engine._decoder.step = spying
        await engine.generate(request())
        seen["later"] = await asyncio.to_thread(torch.get_num_threads)

    session(body, models["dense"][0])
    assert seen == {"worker": 1, "later": 2}
    assert torch.get_num_threads() == 2
