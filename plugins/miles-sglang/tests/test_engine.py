"""The engine over small servers: order, retraction, versions, routing, retries, deaths. No SGLang is needed.

tests/sglang holds the same engine against the real server.
"""

import asyncio
import base64
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from miles_sglang import server_pool
from miles_sglang.sync.sequence import ServerSync
from wire import Wire, WireRouter, log_prob, next_token

from miles_core.config.tables import Perf
from miles_core.errors import EngineError, SyncError


def expected(prompt, count):
    """([count] tokens, [count] log-probs) that an undisturbed server draws."""
    ids, log_probs = list(prompt), []
    for _ in range(count):
        log_probs.append(log_prob(ids, next_token(ids)))
        ids.append(next_token(ids))
    return ids[len(prompt):], log_probs


def check(response, count, prompt=(5, 6, 7)):
    ids, log_probs = expected(prompt, count)
    assert response.output_ids.tolist() == ids
    assert response.log_probs.tolist() == log_probs


async def update(engine, version, servers=None):
    """As a weight sync does."""
    for server in engine.stale(version) if servers is None else servers:
        await server.client.call("/set_version", {"version": str(version)}, timeout=5)
    await engine.confirm(engine.stale(version) if servers is None else servers, version)


async def sync(engine, version):
    await engine.pause(engine._config.rollout.pause_generation_mode)
    await update(engine, version)
    await engine.resume()


def over(make, work, count=1, **options):
    """Run `work(engine, *wires)` on an engine over so many servers."""
    async def story():
        wires = [Wire() for _ in range(count)]
        async with wires[0]:
            for wire in wires[1:]:
                await wire.__aenter__()
            engine = make(*wires, **options)
            await engine.start()
            try:
                return await asyncio.wait_for(work(engine, *wires), 30)
            finally:
                await engine.stop()
                for wire in wires[1:]:
                    await wire.__aexit__()

    return asyncio.run(story())


def test_a_request_says_what_it_wants_and_carries_no_text(engine_over, ask):
    async def work(engine, wire):
        request = ask("a", 6, temperature=0.5, top_p=0.9, top_k=0, stop_token_ids=(97,), want=["routed_experts"])
        return await engine.generate(request), wire.requests[0]

    response, body = over(engine_over, work)
    check(response, 6)
    assert response.finish_reason == "length" and response.versions.tolist() == [0] * 6
    assert response.text == "".join(chr(48 + token) for token in response.output_ids)
    assert response.figures == {"prefix_cache_hit_rate": 2 / 3}
    assert response.extra["routed_experts"].shape == (8, 2, 2)
    assert body.pop("rid").endswith("-train-a")
    assert body == {
        "input_ids": [5, 6, 7], "return_logprob": True, "return_routed_experts": True, "routed_experts_start_len": 0,
        "sampling_params": {
            "temperature": 0.5, "top_p": 0.9, "top_k": -1, "max_new_tokens": 6, "min_new_tokens": 0, "stop": [],
            "stop_token_ids": [97], "ignore_eos": False, "skip_special_tokens": False, "no_stop_trim": True,
            "spaces_between_special_tokens": False}}  # fmt: skip


@pytest.mark.parametrize("pauses", [1, 3])
def test_a_retracted_request_goes_on_from_its_tokens(engine_over, ask, pauses):
    async def work(engine, wire):
        await sync(engine, 1)
        call = asyncio.ensure_future(engine.generate(ask("a", 120, want=["routed_experts"])))
        for version in range(2, 2 + pauses):
            await wire.draws(20)
            await sync(engine, version)
        return await call, wire.requests

    response, bodies = over(engine_over, work)
    check(response, 120)
    assert len(bodies) == 1 + pauses and len({body["rid"] for body in bodies}) == len(bodies)
    cuts = [len(body["input_ids"]) - 3 for body in bodies] + [120]
    assert [body["sampling_params"]["max_new_tokens"] for body in bodies] == [120 - cut for cut in cuts[:-1]]
    assert response.versions.tolist() == [version + 1 for version in range(len(bodies))
                                          for _ in range(cuts[version + 1] - cuts[version])]
    experts = response.extra["routed_experts"]  # the wire's rows are the token ids of their positions
    assert experts[:, 0, 0].tolist() == [5, 6, 7, *response.output_ids.tolist()][:-1] and experts.shape == (122, 2, 2)


def test_in_place_versions_are_those_before_each_piece(engine_over, ask):
    async def work(engine, wire):
        await sync(engine, 1)
        call = asyncio.ensure_future(engine.generate(ask("a", 60)))
        await wire.draws(15)
        await engine.pause("in_place")
        await asyncio.sleep(0.02)
        before = wire.requests, len(wire.running)
        await update(engine, 2)
        await engine.resume()
        return await call, before, wire.requests[0]

    response, (requests, running), body = over(engine_over, work, mode="in_place")
    check(response, 60)
    assert len(requests) == running == 1 and body["stream"] and body["extra_key"].endswith("/1")
    assert set(response.versions) == {1, 2} and (np.diff(response.versions) >= 0).all()


def test_in_place_shares_no_prefix_with_another_run_nor_with_what_other_weights_computed(engine_over, ask):
    """Versions have the same numbers in every run, and a server's cache may be older than the run."""
    async def work(engine, wire):
        await sync(engine, 1)
        await engine.generate(ask("a", 1))
        wire.plan.append({"weight_version": "0"})  # somebody else's weights: asked again
        await engine.generate(ask("b", 1))
        return [body["extra_key"] for body in wire.requests]

    first, second = (over(engine_over, work, mode="in_place") for _ in range(2))
    assert first[0] == first[1] != first[2] and not set(first) & set(second)


def test_a_stop_or_a_length_that_an_abort_hides_is_seen(ask):
    """SGLang looks for the abort before it looks at the token."""
    from miles_sglang.client import Answer
    from miles_sglang.in_flight import InFlightRequest, ModelFacts

    facts = ModelFacts(vocab=100, stops=frozenset({98}), layers=2, topk=2, context=200, longest=195)

    def ended(request, ids):
        inflight = InFlightRequest(request, 0, facts, lambda ids, skip: "".join(chr(48 + token) for token in ids))
        inflight.take([Answer(np.array(ids, np.int32), np.zeros(len(ids), np.float32), "abort", "1")], [1])
        return inflight.reason

    assert ended(ask("a", 9), [1, 2, 98]) == "stop"
    assert ended(ask("a", 9, ignore_eos=True), [1, 2, 98]) is None
    assert ended(ask("a", 9, stop_token_ids=(3,)), [1, 2, 3]) == "stop"
    assert ended(ask("a", 9, min_new_tokens=5, stop_token_ids=(3,)), [1, 2, 3]) is None
    assert ended(ask("a", 3), [1, 2, 3]) == "length"
    assert ended(ask("a", 9, stop=("12",)), [1, 2]) == "stop"
    assert ended(ask("a", 9, prompt=(1,) * 195), [1]) == "length"  # the server takes no longer input
    assert ended(ask("a", 9), []) is None


@pytest.mark.parametrize(("sampling", "reason"), [
    ({}, "stop"), ({"stop_token_ids": (3,)}, "stop"), ({"stop": ("23",)}, "stop"), ({"ignore_eos": True}, "length"),
    ({"ignore_eos": True, "stop_token_ids": (3,)}, "length"), ({"stop": ("12",), "ignore_eos": True}, "stop"),
])
def test_an_end_at_the_limit_is_a_stop_as_it_is_anywhere_else(ask, sampling, reason):
    """SGLang looks for the length before it looks at the token, and the answer would count as truncated."""
    from miles_sglang.client import Answer
    from miles_sglang.in_flight import InFlightRequest, ModelFacts

    ids = [1, 2, 3 if "stop_token_ids" in sampling or "stop" in sampling else 98]
    facts = ModelFacts(vocab=100, stops=frozenset({98}), layers=1, topk=1, context=200, longest=195)
    inflight = InFlightRequest(ask("a", 3, **sampling), 0, facts,
                               lambda ids, skip: "".join(chr(48 + token) for token in ids))
    inflight.take([Answer(np.array(ids, np.int32), np.zeros(len(ids), np.float32), "length", "1")], [1])
    response = inflight.response()
    assert response.finish_reason == reason and response.output_ids.tolist() == ids


def test_no_end_is_drawn_before_min_new_tokens(ask):
    """SGLang holds back the tokenizer's own end and those that it is told; config.json may name further ones."""
    from miles_sglang.in_flight import InFlightRequest, ModelFacts

    facts = ModelFacts(vocab=100, stops=frozenset({97, 98}), layers=1, topk=1, context=200, longest=195)
    for least, told in ((0, [3]), (2, [3, 97, 98])):
        request = ask("a", 4, min_new_tokens=least, stop_token_ids=(3,))
        body = InFlightRequest(request, 0, facts, lambda ids, skip: "").body()
        assert body["sampling_params"]["stop_token_ids"] == told


def test_a_stop_string_across_two_calls_ends_the_response_there(ask):
    from miles_sglang.client import Answer
    from miles_sglang.in_flight import InFlightRequest, ModelFacts

    facts = ModelFacts(vocab=100, stops=frozenset({98}), layers=1, topk=1, context=200, longest=195)
    inflight = InFlightRequest(ask("a", 9, stop=("23",), want=["routed_experts"]), 0, facts,
                    lambda ids, skip: "".join(chr(48 + token) for token in ids))
    for ids, reason, rows in (([1, 2], "abort", 4), ([3, 4, 5], "length", 3)):
        inflight.body()
        inflight.take([Answer(np.array(ids, np.int32), np.array(ids, np.float32), reason, "1",
                            np.arange(rows, dtype=np.int32))], [len(ids)])
    response = inflight.response()
    assert response.output_ids.tolist() == response.log_probs.tolist() == [1, 2, 3]
    assert response.versions.tolist() == [2, 2, 3] and response.text == "123" and response.finish_reason == "stop"
    assert len(response.extra["routed_experts"]) == 3 + 3 - 1


def test_a_stop_string_that_began_in_an_earlier_request_ends_the_response(ask):
    from miles_sglang.client import Answer
    from miles_sglang.in_flight import InFlightRequest, ModelFacts

    facts = ModelFacts(vocab=100, stops=frozenset({98}), layers=1, topk=1, context=200, longest=195)

    def answered(reason):
        request = replace(ask("a", 9, stop=("23",), prompt=(5, 1, 2)), resumed=(1, 2))
        inflight = InFlightRequest(request, 0, facts, lambda ids, skip: "".join(chr(48 + token) for token in ids))
        inflight.body()
        inflight.take([Answer(np.array([3, 4], np.int32), np.zeros(2, np.float32), reason, "1")], [1])
        return inflight.response()

    for reason in ("length", "abort"):
        response = answered(reason)
        assert response.output_ids.tolist() == [3] and response.text == "3" and response.finish_reason == "stop"


@pytest.mark.parametrize("end", [2, 700, 2999, 3000])
def test_a_stop_string_in_a_long_answer_is_found_with_few_looks(ask, end):
    """Decoding takes as long as there are tokens, and the driver's loop waits for it."""
    from miles_sglang.client import Answer
    from miles_sglang.in_flight import InFlightRequest, ModelFacts

    ids, looks = np.ones(3000, np.int32), []
    ids[end - 2:end] = 2, 3

    def decode(ids, skip):
        looks.append(len(ids))
        return "".join(chr(48 + token) for token in ids)

    facts = ModelFacts(vocab=100, stops=frozenset({98}), layers=1, topk=1, context=4000, longest=3995)
    inflight = InFlightRequest(ask("a", 3000, stop=("9", "23")), 0, facts, decode)
    inflight.body()
    for part, reason in ((ids[:1], "abort"), (ids[1:], "length")):
        inflight.take([Answer(part, part.astype(np.float32), reason, "1")], [1])
    assert inflight.response().output_ids.tolist() == ids[:end].tolist() and len(looks) < 20


@pytest.mark.parametrize(("ids", "reason", "sampling", "end"), [
    ([1, 98, 3, 4], "length", {}, 2), ([1, 2, 3, 98], "length", {}, 4), ([1, 2, 3, 4], "length", {}, 4),
    ([1, 98, 3, 4], "length", {"ignore_eos": True}, 4), ([1, 98, 3, 98], "length", {"min_new_tokens": 2}, 4),
    ([1, 2, 3, 4], "length", {"stop": ("12",)}, 2), ([1, 2, 3, 4], "length", {"stop_token_ids": (3,)}, 3),
    ([1, 98, 3], "abort", {}, 2),
], ids=["stop", "at the limit", "none", "ignored", "too early", "string", "own", "aborted"])
def test_what_drafts_add_after_the_end_is_cut(ask, ids, reason, sampling, end):
    """They are accepted in blocks, and SGLang looks for length and abort before it looks for an end within one."""
    from miles_sglang.client import Answer
    from miles_sglang.in_flight import InFlightRequest, ModelFacts

    facts = ModelFacts(vocab=100, stops=frozenset({98}), layers=1, topk=1, context=200, longest=195)
    inflight = InFlightRequest(ask("a", 4, want=["routed_experts"], **sampling), 0, facts,
                               lambda ids, skip: "".join(chr(48 + token) for token in ids))
    inflight.body()
    rows = np.arange(3 + len(ids) - 1, dtype=np.int32)
    inflight.take([Answer(np.array(ids, np.int32), np.array(ids, np.float32), reason, "1", rows,
                          {"spec_proposed_drafts": 3, "spec_correct_drafts": 3, "spec_verify_ct": 1})], [1])
    response = inflight.response()
    assert response.output_ids.tolist() == response.log_probs.tolist() == ids[:end]
    assert len(response.versions) == end and len(response.extra["routed_experts"]) == 3 + end - 1
    stopped = end < len(ids) or ids[-1] == 98 and "ignore_eos" not in sampling
    assert response.finish_reason == ("stop" if stopped else "length")


def with_images(request):
    """Of two, the first has two tokens."""
    first, *rest = request.input_ids
    return replace(request, input_ids=(first, first, *rest), unexpanded=request.input_ids, images=(b"one", b"two"))


def test_images_go_with_every_call_and_the_server_expands_their_placeholders(engine_over, ask):
    async def work(engine, wire):
        request = with_images(ask("a", 4))
        wire.plan = [500, {"prompt_tokens": len(request.input_ids)}]
        return request, await engine.generate(request), list(wire.requests)

    request, response, bodies = over(engine_over, work)
    check(response, 4)
    assert len(bodies) == 2 and all(body["input_ids"] == list(request.unexpanded) for body in bodies)
    data = [[base64.b64decode(one.partition(",")[2]) for one in body["image_data"]] for body in bodies]
    assert data == [[b"one", b"two"]] * 2


def test_images_that_the_server_expands_to_another_number_of_tokens_are_an_error(engine_over, ask):
    async def work(engine, wire):
        await engine.generate(with_images(ask("a", 4)))

    with pytest.raises(EngineError) as caught:
        over(engine_over, work)
    assert caught.value.code == "sglang-image-tokens" and "3 tokens of input, not 4" in caught.value.got


@pytest.mark.parametrize(("pieces", "versions", "kinds"), [
    ([(6, 0)], [1], "000000"), ([(6, 2)], [1], "111111"),
    ([(2, 0), (1, 0), (1, 1), (2, 1)], [1, 1, 1, 1], "111100"),
    ([(2, 0), (1, 0), (1, 1), (2, 1)], [1, 2, 2, 3], "221100"),
    ([(2, 1), (2, 1), (1, 2), (1, 2)], [1, 1, 2, 2], "222210"),
], ids=["never", "in one piece", "in the third piece", "after an update", "twice"])
def test_experts_of_tokens_that_the_server_computed_again_are_marked(ask, pieces, versions, kinds):
    """It tells those of the last time, which the tokens drawn before were not drawn with. The prompt's last position
    predicts the first token; a second call's rows begin where the first ended."""
    from miles_sglang.client import Answer
    from miles_sglang.in_flight import InFlightRequest, ModelFacts

    facts = ModelFacts(vocab=100, stops=frozenset({98}), layers=1, topk=1, context=200, longest=195)
    inflight = InFlightRequest(ask("a", 20, want=["routed_experts"]), 0, facts, lambda ids, skip: "")

    def call(pieces, first):
        rows = np.arange(first, 2 + sum(count for count, _ in pieces) + len(inflight.ids), dtype=np.int32)
        answers = [Answer(np.zeros(count, np.int32), np.zeros(count, np.float32), None, "1", rows,
                          {"num_retractions": retracted}) for count, retracted in pieces]
        answers[-1].reason = "abort"
        inflight.body()
        inflight.take(answers, versions)

    call(pieces, 0)
    versions = [3]
    call([(3, 0)], 8)
    assert inflight.response().extra["routed_experts"].ravel().tolist() == list(range(11))
    assert "".join(map(str, inflight.response().extra["computed_again"])) == "00" + kinds + "000"
    figures = inflight.response().figures
    assert figures.get("engine_retractions", 0) == pieces[-1][1]
    assert figures.get("experts_computed_again", 0) == pytest.approx((6 - kinds.count("0")) / 11)
    call([(2, 1)], 11)
    assert "".join(map(str, inflight.response().extra["computed_again"])) == "00" + kinds + "00011"


def test_requests_leave_in_order_and_not_more_than_there_is_room(engine_over, ask):
    async def work(engine, *wires):
        calls = [asyncio.ensure_future(engine.generate(ask(i, 4))) for i in range(30)]
        await wires[0].draws(1)
        assert len(engine._scheduler.sent) == 6
        for response in await asyncio.gather(*calls):
            check(response, 4)
        return [[int(body["rid"].rpartition("-")[2]) for body in wire.requests] for wire in wires]

    names = over(engine_over, work, 2, server_concurrency=3)
    assert sorted(names[0] + names[1]) == list(range(30))
    assert all(sorted(each) == each for each in names) and min(map(len, names)) > 10  # both work, each in order


@pytest.mark.parametrize("fault", [500, 503, 429, "reset", {"weight_version": "8"}, {"completion_tokens": 99},
                                   {"output_token_logprobs": []}, {"finish_reason": {"type": "abort"}},
                                   {"completion_tokens": 4}, {"completion_tokens": 0}, {"prompt_tokens": 2},
                                   {"id": "train-b"}], ids=str)
def test_what_may_be_sent_again_is_sent_again(engine_over, ask, fault):
    async def work(engine, wire):
        await sync(engine, 3)
        wire.plan = [fault, fault]
        return await engine.generate(ask("a", 5)), wire.requests, engine.events

    response, bodies, events = over(engine_over, work)
    assert response.output_ids.tolist() == expected((5, 6, 7), 5)[0]
    again = len(bodies) - 1
    assert again == events.count("request_failed") == response.figures.get("engine_retries", 0) or "abort" in str(fault)
    assert again == (0 if "abort" in str(fault) else 2)  # nothing is left to draw after all five tokens


def test_what_may_not_be_sent_again_is_an_error_at_once(engine_over, ask):
    async def work(engine, wire):
        wire.plan = [400]
        with pytest.raises(EngineError, match=r"/generate .*HTTP 400 \(got planned 400\)"):
            await engine.generate(ask("a", 5))
        assert len(wire.requests) == 1

    over(engine_over, work)


def test_what_a_server_says_of_an_end_of_its_own_is_told(engine_over, ask, monkeypatch):
    monkeypatch.setattr("miles_sglang.engine.RETRIES", 0)

    async def work(engine, wire):
        wire.plan = [{"finish_reason": {"type": "abort", "message": "out of memory"}, "completion_tokens": 0}]
        with pytest.raises(EngineError) as caught:
            await engine.generate(ask("a", 5))
        return caught.value

    error = over(engine_over, work)
    assert error.code == "request-retries-exhausted" and "out of memory" in error.got


def test_tries_are_bounded(engine_over, ask, monkeypatch):
    monkeypatch.setattr("miles_sglang.engine.RETRIES", 2)

    async def work(engine, wire):
        wire.plan = [500] * 10
        with pytest.raises(EngineError, match="train-a failed 3 times .got external engine 0.*planned 500"):
            await engine.generate(ask("a", 5))
        assert len(wire.requests) == 3

    over(engine_over, work)


def test_an_aborted_request_returns_its_tokens_wherever_it_is(engine_over, ask):
    async def work(engine, wire):
        flying, waiting = (asyncio.ensure_future(engine.generate(ask(name, 150))) for name in ("a", "b"))
        await wire.draws(15)
        await engine.abort(["train-a", "train-b"])
        responses = await asyncio.gather(flying, waiting)
        assert not wire.running
        return responses

    flying, waiting = over(engine_over, work, server_concurrency=1)
    assert flying.finish_reason == waiting.finish_reason == "abort"
    assert 0 < len(flying.output_ids) < 150 and len(waiting.output_ids) == 0
    check(flying, len(flying.output_ids))


def test_a_server_that_does_not_answer_an_abort_is_waited_for_once_as_long(engine_over, ask):
    """Each second of the bound was another abort, and each of these waited half a minute for its answer."""
    async def work(engine, wire):
        aborts = []

        async def slow(rid=None):
            aborts.append(rid)
            await asyncio.sleep(1.5)

        engine._drain_seconds, engine.servers[0].client.abort = 3.0, slow
        call = asyncio.ensure_future(engine.generate(ask("a", 150)))
        wire.step = 0.2
        await wire.draws(1)
        with pytest.raises(EngineError) as caught:
            await engine.abort()
        call.cancel()
        return caught.value, aborts

    error, aborts = over(engine_over, work)
    assert error.code == "requests-not-drained" and error.who == "external engine 0" and len(aborts) == 2


def test_a_cancelled_call_ends_at_the_server(engine_over, ask):
    async def work(engine, wire):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.generate(ask("a", 190)), 0.05)
        while wire.running:
            await asyncio.sleep(0.005)
        assert not engine._in_flight and not engine._scheduler.sent
        check(await engine.generate(ask("a", 3)), 3)

    over(engine_over, work)


def test_nothing_is_sent_from_pause_to_resume_nor_without_memory(engine_over, ask):
    async def work(engine, wire):
        await engine.pause("abort")
        call = asyncio.ensure_future(engine.generate(ask("a", 3)))
        await engine.release(["weights", "kv_cache"])
        await engine.occupy(["weights"])
        await update(engine, 1)
        await engine.resume()
        await asyncio.sleep(0.05)
        told = [name for name, _ in wire.calls]
        assert not wire.requests and "flush_cache" not in told and told.count("continue_generation") == 1
        await engine.occupy(["kv_cache"])
        return await call

    assert over(engine_over, work).versions.tolist() == [1, 1, 1]


def test_a_version_is_confirmed_by_every_server_or_not_in_use(engine_over, ask):
    async def work(engine, *wires):
        await sync(engine, 1)
        await engine.pause()
        wires[0].version = "2"
        with pytest.raises(SyncError, match="engine 1: the server does not have weights of version 2 .got '1'"):
            await engine.confirm(engine.servers, 2)
        assert [server.version for server in engine.servers] == [1, 1] and engine.version == 1

    over(engine_over, work, 2)


def test_a_server_that_dies_while_its_version_is_confirmed_is_brought_back_later(engine_over, ask, monkeypatch):
    """The others serve the new version meanwhile; one that lives and does not answer ends the sync."""
    async def work(engine, one, two):
        async def recover():
            await update(engine, engine.version)

        async def gone(server):
            return "its process ended with code -9" if server is engine.servers[0] and dead else None

        async def broken():
            raise EngineError("the connection was lost")

        dead, engine.recover = True, recover
        await sync(engine, 1)
        flush, engine.servers[0].client.flush = engine.servers[0].client.flush, broken
        monkeypatch.setattr(server_pool, "exited", gone)
        await sync(engine, 2)
        assert [server.version for server in engine.servers] == [0, 2] and engine.version == 2
        assert "engine_lost" in engine.events
        assert set((await engine.generate(ask("a", 5))).versions) == {2}
        engine.servers[0].client.flush, dead, one.version = flush, False, "default"
        while not engine.servers[0].version:
            await asyncio.sleep(0.05)
        assert one.version == "2"
        engine.servers[0].client.flush = broken
        with pytest.raises(SyncError, match="version 3 is not in use: the connection was lost"):
            await sync(engine, 3)

    over(engine_over, work, 2)


def test_a_server_that_is_lost_before_the_first_sync_gets_the_weights_once_it_is_back(engine_over, ask):
    """It has no version then, and neither had the engine: nobody saw that it lags behind."""
    async def work(engine, wire):
        async def recover():
            await update(engine, 1)

        engine.recover, wire.alive = recover, False
        while engine.servers[0].alive:
            await asyncio.sleep(0.05)
        await ServerSync(engine._config, lambda targets: targets).sync(None, engine, 1)
        wire.alive = True
        return await asyncio.wait_for(engine.generate(ask("a", 5)), 15)

    assert set(over(engine_over, work, trained=True, health_check_timeout=0.3).versions) == {1}


def test_requests_of_a_dead_server_go_to_another_and_it_comes_back_with_weights(engine_over, ask):
    async def work(engine, one, two):
        recovered = []

        async def recover():
            recovered.append([server.name for server in engine.stale(engine.version)])
            await update(engine, engine.version)

        engine.recover = recover
        await sync(engine, 1)
        one.step = two.step = 0.01
        calls = [asyncio.ensure_future(engine.generate(ask(i, 40))) for i in range(8)]
        await one.draws(20)
        one.alive = False
        for response in await asyncio.gather(*calls):
            check(response, 40)
            assert set(response.versions) == {1}
        assert [server.alive for server in engine.servers] == [False, True] and "engine_lost" in engine.events
        one.alive, one.version = True, "default"
        while not engine.servers[0].version:
            await asyncio.sleep(0.05)
        assert recovered == [["external engine 0"]] and one.version == "1"

    over(engine_over, work, 2, health_check_timeout=0.5)


@pytest.mark.parametrize("path", ["pause_generation", "continue_generation"])
def test_a_server_that_hangs_in_a_sync_is_found_before_the_sync_is_late(engine_over, path):
    """It is named and started again; the sync alone would have said that it was late."""
    async def work(engine, one, two):
        lost = []
        engine.event = lambda kind, **fields: lost.append(fields) if kind == "engine_lost" else None
        one.stuck = path
        async with asyncio.timeout(5.7):
            await sync(engine, 1)
        assert [each["engine"] for each in lost] == ["external engine 0"] and f"/{path}" in lost[0]["why"]
        one.stuck = ""

    over(engine_over, work, 2, perf=Perf(weight_sync_timeout=6.0))


@pytest.mark.parametrize("bounded", [False, True])
def test_a_silent_server_is_waited_for_while_kernels_are_compiled(engine_over, ask, monkeypatch, bounded):
    async def work(engine, one, two):
        running, told = ["nvcc"], []
        engine.event = lambda kind, **fields: told.append(kind) if fields.get("engine") == "external engine 0" else None

        async def compilers(server):  # the other server's, for whose lock it waits
            return running if server is engine.servers[1] else []

        monkeypatch.setattr(server_pool, "compilers", compilers)
        call = asyncio.ensure_future(engine.generate(ask("a", 40)))
        await asyncio.sleep(0.1)
        one.alive = False
        while not told:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.8)
        if not bounded:
            assert told == ["engine_compiles"] and engine.servers[0].alive, "said once"
            running.clear()
        while engine.servers[0].alive:
            await asyncio.sleep(0.05)
        assert told[:2] == ["engine_compiles", "engine_lost"]
        one.alive = True
        check(await call, 40)

    over(engine_over, work, 2, health_check_timeout=0.5, **({"server_start_timeout": 2.5} if bounded else {}))


def test_a_server_is_not_dead_because_the_driver_was_busy(engine_over, ask):
    """The server has a loop of its own, and its answers lie unread."""
    wires, began, ended = [], threading.Event(), threading.Event()

    async def serve():
        async with Wire() as wire:
            wires.append(wire)
            began.set()
            await asyncio.to_thread(ended.wait)

    async def drive(wire):
        engine = engine_over(wire, health_check_timeout=1.0)
        await engine.start()
        await asyncio.sleep(0.4)  # a look is due soon
        for _ in range(4):
            time.sleep(1.1)  # as a hook that parses
            await asyncio.sleep(0)
        await asyncio.sleep(0.2)
        check(await engine.generate(ask("a", 5)), 5)
        assert "engine_lost" not in engine.events
        wire.alive = False
        async with asyncio.timeout(10):
            while "engine_lost" not in engine.events:
                await asyncio.sleep(0.05)
        wire.alive = True
        await engine.stop()

    server = threading.Thread(target=asyncio.run, args=(serve(),))
    server.start()
    try:
        began.wait(10)
        asyncio.run(drive(wires[0]))
    finally:
        ended.set()
        server.join()


def test_a_server_with_other_weights_than_it_should_have_is_taken_out_of_use(engine_over, ask):
    async def work(engine, one, two):
        async def recover():
            await update(engine, engine.version)

        engine.recover = recover
        await sync(engine, 4)
        one.version = "default"  # restarted behind our back
        responses = await asyncio.gather(*(engine.generate(ask(i, 5)) for i in range(6)))
        assert all(set(response.versions) == {4} for response in responses)
        assert "engine_stale" in engine.events
        while not engine.servers[0].version:
            await asyncio.sleep(0.05)
        assert one.version == "4"

    over(engine_over, work, 2)


@pytest.mark.parametrize(("change", "words"), [
    ({"loader": None}, "start it with --custom-weight-loader miles_weights.load"),
    ({"gone": True}, "no SGLang server answers")])
def test_an_external_server_that_does_not_fit_is_one_sentence(engine_over, change, words):
    async def story():
        async with Wire() as wire:
            wire.loader = change.get("loader", wire.loader)
            wire.url = "http://127.0.0.1:9" if change.get("gone") else wire.url
            with pytest.raises(EngineError, match=words):
                await engine_over(wire, trained=True).start()

    asyncio.run(story())


@pytest.mark.parametrize("protocol", ["new", "old"])
def test_workers_come_and_go_by_either_protocol(config, tmp_path, protocol):
    from miles_sglang.router import Router

    async def story():
        async with WireRouter(protocol) as wire:
            router = Router(config, tmp_path / "router.log", wire.url)
            await router.start()
            for url in ("http://a:1", "http://b:2", "http://a:1"):
                await router.add(url)
            assert sorted(wire.workers.values()) == ["http://a:1", "http://b:2"]
            await router.remove("http://a:1")
            assert list(wire.workers.values()) == ["http://b:2"]
            await router.stop()
            assert not wire.workers  # a router that ran before is left as it was
            wire.workers["x"] = "http://stranger:3"
            other = Router(config, tmp_path / "router.log", wire.url)
            with pytest.raises(EngineError, match="workers that this run does not know.*stranger"):
                await other.start()
            await other.stop()
            assert wire.workers

    asyncio.run(story())


def test_a_router_gets_the_servers_when_they_are_let_go(engine_over):
    """It asks each for a token, which a paused one does not draw: a first sync would wait for ever."""
    async def story():
        async with Wire() as one, Wire() as two, WireRouter("new", (one, two)) as wire:
            host, port = wire.url.removeprefix("http://").split(":")
            engine = engine_over(one, two, trained=True, router="smg", router_ip=host, router_port=int(port))
            await engine.start()
            try:
                assert not wire.workers  # they have no weights yet
                async with asyncio.timeout(5):
                    await sync(engine, 1)
                assert sorted(wire.workers.values()) == sorted([one.url, two.url])
            finally:
                await engine.stop()

    asyncio.run(story())


def test_a_router_that_is_none_says_what_was_tried(config, tmp_path):
    from miles_sglang.router import Router

    async def story():
        async with Wire() as wire:
            router = Router(config, tmp_path / "router.log", wire.url)
            with pytest.raises(EngineError, match="answers neither /workers nor /list_workers"):
                await router.start()
            await router.stop()

    asyncio.run(story())


def test_a_router_port_that_is_taken_is_one_sentence(config, tmp_path):
    import socket

    from miles_sglang.router import Router

    from miles_core.config.load import with_values

    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        chosen = with_values(config, "this test", sglang__router="smg", sglang__router_port=held.getsockname()[1])
        with pytest.raises(EngineError, match="the router's port cannot be used .got Address already in use"):
            Router(chosen, tmp_path / "router.log")


def test_sizes_that_config_json_leaves_out_are_transformers_own(tmp_path):
    """Gemma 3's of 4B and more says neither how many tokens there are nor how long a context is."""
    import json

    from miles_sglang.in_flight import ModelFacts

    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "gemma3", "eos_token_id": [1, 106],
        "text_config": {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 34}}))
    facts = ModelFacts.read(tmp_path, 1, None)
    assert (facts.vocab, facts.layers, facts.context, facts.stops) == (262208, 34, 131072, {1, 106})


@pytest.mark.parametrize("key", ["num_experts_per_tok", "top_k_experts"])
def test_experts_of_a_token_are_read_under_both_names(key, tmp_path):
    """The second is Gemma 4's."""
    import json

    from miles_sglang.in_flight import ModelFacts

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma4_text", "num_hidden_layers": 30, key: 8}))
    assert ModelFacts.read(tmp_path, 1, None).topk == 8
