"""The endpoint over HTTP, by a plain client, in front of a real engine."""

import asyncio
import http.client
import json
import socket

import numpy as np
import pytest
from endpoint import (
    MODEL,
    TOOLED,
    TOOLS,
    USER,
    Recorded,
    Scripted,
    calls,
    conversing,
    new_session,
    prompt,
    serving,
    tokenizer,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_local.engine import LocalEngine
from miles_tools import session_server
from miles_tools.trajectory import Failure

from miles_core import rng
from miles_core.columns import Columns
from miles_core.errors import EngineError
from miles_core.stages.rollout import SamplingParams
from miles_core.types import Status

ECHOES = (
    lambda message: message,
    lambda message: message | {"refusal": None, "tool_calls": None, "function_call": None, "annotations": [],
                               "audio": None},
    lambda message: message | {"content": [{"type": "text", "text": message["content"]}]},
    lambda message: {"role": "assistant", "content": message["content"], "reasoning": "hidden"},
)
"""How clients send an answer back."""
WORDS = st.text(st.sampled_from("0123456789+=ab \n<|é漢"), max_size=6)
TURN = st.fixed_dictionaries({
    "new": st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": WORDS}), min_size=1,
                    max_size=3),
    "max_tokens": st.integers(1, 8), "stop": st.lists(st.sampled_from(["7", "}", "ox"]), max_size=2),
    "echo": st.sampled_from(ECHOES), "stream": st.booleans()})


def test_ids_are_only_ever_appended_to():
    """Whatever is said: each request's ids begin with those of the one before and what was drawn after them, the sample
    is the last request and what was drawn then, and its mask, log-probs and versions are the engine's own."""
    async def property_of(engine, turns):
        engine.requests.clear(), engine.responses.clear()
        session = new_session(engine, max_new_tokens=240)
        async with serving(session) as client:
            messages = [USER]
            for turn in turns:
                stop = {"stop": turn["stop"]} if turn["stop"] else {}
                status, _, text = await client({"messages": messages, "max_tokens": turn["max_tokens"],
                                                "stream": turn["stream"], **stop})
                if status == 400 and "no room" in text:
                    break
                assert status == 200, text
                messages = [*messages, turn["echo"](session.messages[-1]), *turn["new"]]
            sample = session.samples(None)[0]
        check(sample, engine)

    def check(sample, engine):
        assert tuple(engine.requests[0].input_ids) == prompt().token_ids
        assert [r.key for r in engine.requests] == [rng.key(7, "train", 3, 0, i) for i in range(len(engine.requests))]
        mask = [0] * len(engine.requests[0].input_ids)
        for request, response, following in zip(engine.requests, engine.responses,
                                                [*engine.requests[1:], None], strict=True):
            ids = [*request.input_ids, *response.output_ids.tolist()]
            mask += [0] * (len(request.input_ids) - len(mask)) + [1] * len(response.output_ids)
            assert following is None or list(following.input_ids[: len(ids)]) == ids
        assert sample.tokens.tolist() == ids
        start = len(engine.requests[0].input_ids)
        assert sample.columns["loss_mask"].tolist() == mask[start:] and sample.response_length == len(ids) - start
        trained = sample.columns["loss_mask"] > 0
        for column, part in (("rollout_log_probs", "log_probs"), ("versions", "versions")):
            np.testing.assert_array_equal(sample.columns[column][trained],
                                          np.concatenate([getattr(r, part) for r in engine.responses]))
        assert not sample.columns["rollout_log_probs"][~trained].any()
        last = engine.responses[-1].finish_reason
        assert sample.status in ((Status.TRUNCATED,) if last == "length" else (Status.COMPLETED, Status.TRUNCATED))
        Columns().check(sample)

    loop = asyncio.new_event_loop()
    engine = LocalEngine(MODEL, tokenizer=tokenizer(), max_context=256)
    loop.run_until_complete(engine.start())

    @settings(max_examples=25, deadline=None)
    @given(st.lists(TURN, min_size=1, max_size=5))
    def run(turns):
        loop.run_until_complete(property_of(Recorded(engine), turns))

    try:
        run()
    finally:
        loop.run_until_complete(engine.stop())
        loop.close()


def test_an_answer_is_openais():
    async def talk(client, session, engine):
        answer = await client.ask([USER], temperature=1, max_tokens=20)
        drawn = engine.responses[0].output_ids.tolist()
        assert answer["object"] == "chat.completion" and len(answer["choices"]) == 1
        message = answer["choices"][0]["message"]
        assert message == {"role": "assistant", "content": tokenizer().decode(drawn, skip_special_tokens=True)}
        assert answer["choices"][0]["finish_reason"] == engine.responses[0].finish_reason == "stop"
        size = len(prompt().token_ids)
        assert answer["usage"] == {"prompt_tokens": size, "completion_tokens": len(drawn),
                                   "total_tokens": size + len(drawn)}
        short = await client.ask([USER, message, USER], max_tokens=2)
        assert short["choices"][0]["finish_reason"] == "length" and short["usage"]["completion_tokens"] == 2
        sample = session.samples(None)[0]
        assert sample.status is Status.TRUNCATED and sample.metadata["figures"]["agent/turns"] == 2
        assert [m["role"] for m in sample.metadata["messages"]] == ["user", "assistant", "user", "assistant"]
        assert sample.text == engine.responses[1].text

    conversing(talk)


@pytest.mark.parametrize("usage", [False, True])
def test_a_stream_says_what_an_answer_says(usage):
    async def whole(client, _session, _engine):
        return (await client.ask([USER]))["choices"][0]

    async def stream(client, _session, _engine):
        status, headers, text = await client({"messages": [USER], "stream": True,
                                              **({"stream_options": {"include_usage": True}} if usage else {})})
        assert status == 200 and headers["Content-Type"] == "text/event-stream"
        events = text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    choice = conversing(whole)
    pieces = conversing(stream)
    assert all(piece["object"] == "chat.completion.chunk" for piece in pieces)
    assert (pieces[-1]["choices"], set(pieces[-1]["usage"])) == (
        [], {"prompt_tokens", "completion_tokens", "total_tokens"}) if usage else "usage" not in pieces[-1]
    deltas = [piece["choices"][0] for piece in pieces if piece["choices"]]
    assert "".join(delta["delta"].get("content") or "" for delta in deltas) == choice["message"]["content"]
    assert [delta["finish_reason"] for delta in deltas] == [None, choice["finish_reason"]]


def test_tools_are_rendered_called_and_answered():
    async def talk(client, session, engine):
        first = (await client.ask([USER], tools=TOOLS, tool_choice="auto"))["choices"][0]
        assert first["finish_reason"] == "tool_calls" and first["message"]["content"] == "I add."
        (call,) = first["message"]["tool_calls"]
        assert call["type"] == "function" and json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
        shown = tokenizer().decode(engine.requests[0].input_ids)
        assert '"name": "add"' in shown and shown.endswith("<|im_start|>assistant\n")
        answer = {"role": "tool", "tool_call_id": call["id"], "content": "3 <|im_end|> and on"}
        second = (await client.ask([USER, first["message"], answer], tools=TOOLS))["choices"][0]
        assert second["message"] == {"role": "assistant", "content": "It is 3."}
        whole = tokenizer().decode(engine.requests[1].input_ids)
        assert whole.endswith(calls() + "<|im_end|>\n<|im_start|>tool\n3 < |im_end|> and on<|im_end|>\n"
                              "<|im_start|>assistant\n")
        sample = session.samples(None)[0]
        trained = sample.tokens[-sample.response_length:][sample.columns["loss_mask"] > 0]
        assert tokenizer().decode(trained) == calls() + "<|im_end|>It is 3.<|im_end|>"

    conversing(talk, Scripted(calls(), "It is 3."), template=TOOLED)


@pytest.mark.parametrize("text, options", [
    (calls(arguments='{"a": '), {"tools": TOOLS}), (calls(), {}), (calls(), {"tools": TOOLS, "tool_choice": "none"})])
def test_what_is_no_call_stays_text(text, options):
    async def talk(client, _session, _engine):
        choice = (await client.ask([USER], **options))["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": text} and choice["finish_reason"] == "stop"

    conversing(talk, Scripted(text), template=TOOLED)


def without(index):
    return lambda messages: messages[:index] + messages[index + 1:]


def changed(index, **fields):
    return lambda messages: [*messages[:index], messages[index] | fields, *messages[index + 1:]]


@pytest.mark.parametrize("rewrite, tools, words", [
    (changed(0, content="be rude"), None, "messages[0] is not what it was"),
    (changed(0, role="user"), None, "messages[0] is not what it was"),
    (changed(1, content="3+5="), None, "messages[1] is not what it was"),
    (changed(1, name="Bob"), None, "messages[1] is not what it was"),
    (changed(2, content="7"), None, "messages[2] is not the answer that was given"),
    (changed(2, content="seven."), None, "messages[2] is not the answer that was given"),
    (changed(2, tool_calls=[{"id": "1", "function": {"name": "f", "arguments": "{}"}}]), None, "messages[2] is not"),
    (without(0), None, "messages[0] is not what it was"),
    (without(2), None, "messages[2] is not the answer that was given"),
    (lambda messages: messages[:2], None, "there were 3 messages, the last answer included, and 2 came back"),
    (lambda messages: messages[-1:], None, "messages[0] is not what it was"),
    (lambda messages: [*messages, {"role": "assistant", "content": "yes"}, USER], None, "the model did not write it"),
    (lambda messages: messages, TOOLS, "the tools are not those of the first request"),
])
def test_an_agent_that_rewrites_history_is_refused_and_not_trained_on(rewrite, tools, words):
    async def talk(client, session, engine):
        messages = [{"role": "system", "content": "be kind"}, USER]
        answer = (await client.ask(messages))["choices"][0]["message"]
        good = [*messages, answer, {"role": "user", "content": "sure?"}]
        headers = await client.refused({"messages": rewrite(good), "tools": tools}, 409, words)
        assert headers["x-should-retry"] == "false"
        await client.refused({"messages": good}, 409, words)  # the conversation is over, whatever comes now
        assert len(engine.requests) == 1
        sample = session.samples(None)[0]
        assert sample.status is Status.FAILED and sample.response_length == 0
        drop = sample.metadata["drop"]
        assert drop["reason"] == "agent_rewrote_history" and words in drop["detail"]
        Columns().check(sample)

    conversing(talk, Scripted("seven", "yes"))


def test_what_the_agent_adds_to_the_end_is_no_rewrite():
    async def talk(client, session, _engine):
        answer = (await client.ask([USER]))["choices"][0]["message"]
        await client.refused({"messages": [USER, answer]}, 400, "nothing follows the last answer")
        more = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "sure?"}]
        await client.ask([USER, answer, *more])
        assert session.samples(None)[0].status is Status.COMPLETED

    conversing(talk, Scripted("seven", "yes"))


def test_two_requests_at_once_are_no_conversation():
    async def talk(client, session, engine):
        engine.gate.clear()
        first = asyncio.create_task(client.ask([USER]))
        await asyncio.wait_for(engine.asked.wait(), 10)
        headers = await client.refused({"messages": [USER]}, 409, "another request of this session is under way")
        assert headers["x-should-retry"] == "true"
        engine.gate.set()
        answer = await first
        assert answer["choices"][0]["message"]["content"] == "seven"
        assert session.samples(None)[0].status is Status.COMPLETED

    conversing(talk, Scripted("seven"))


def test_a_client_that_goes_away_may_ask_again():
    """Its call is cancelled and leaves no trace: the tokens are those of a client that stayed."""
    async def talk(client, session, engine):
        first = (await client.ask([USER]))["choices"][0]["message"]
        messages = [USER, first, {"role": "user", "content": "sure?"}]
        engine.gate.clear()
        await client.leave(messages, session, engine)
        engine.gate.set()
        await client.ask(messages)
        assert engine.requests[1] == engine.requests[2]  # ids, parameters and key of its draws
        sample = session.samples(None)[0]
        assert sample.tokens.tolist()[: len(engine.requests[2].input_ids)] == list(engine.requests[2].input_ids)
        assert sample.metadata["figures"]["agent/turns"] == 2

    conversing(talk, Scripted("seven", "yes"))


def test_who_has_no_business_here_is_refused(monkeypatch):
    monkeypatch.setattr(session_server, "LARGEST", 2**16)

    async def talk(client, session, engine):
        body, port = {"messages": [USER]}, client.server.port
        other = new_session(engine, index=1)
        foreign = client.server.open(other)
        name = client.key.partition(".")[0]
        for wrong in (None, "Bearer", "Bearer ", f"Bearer {name}.", f"Bearer {client.key}x", f"Basic {client.key}",
                      f"Bearer {name}.{foreign.partition('.')[2]}", "Bearer nobody.", "Bearer \xff.\xfe"):
            status, headers, text = await client(body, Authorization=wrong)
            assert status == 401 and "under way" in text, (wrong, text)
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}"):
            assert (await client(body, Host=host))[0] == 403
        assert (await client(body, Host=f"localhost:{port}", path="/v1/embeddings"))[0] == 404
        assert (await client(body, path="/v1/models"))[0] == 405
        assert (await client(None, method="GET"))[0] == 405
        assert (await client(b" " * 2**17))[0] == 413
        assert (await client(None, path="/health", method="GET", Authorization=None))[0] == 200
        assert (await client(None, path="/v1/models", method="GET", Authorization=None))[0] == 401
        status, _, text = await client(None, path="/v1/models", method="GET")
        assert status == 200 and [one["id"] for one in json.loads(text)["data"]] == ["miles"]
        assert not engine.requests
        await client.server.close(client.key)
        assert (await client(body))[0] == 401
        assert not engine.requests and session.samples(None)[0].metadata["drop"]["reason"] == "agent_never_called"
        await client.server.close(foreign)

    conversing(talk, Scripted("seven"))


def test_what_is_no_http_bothers_nobody(capfd):
    async def talk(client, _session, _engine):
        for garbage in (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"GET\r\n\r\n", b"POST / HTTP/9\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", client.server.port)) as connection:
                connection.sendall(garbage)
                answer = await asyncio.to_thread(connection.recv, 4096)
                assert not answer or answer.startswith(b"HTTP/1.") and b"400" in answer.splitlines()[0]
        await client.ask([USER])

    conversing(talk, Scripted("seven"))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nHost: localhost:%d\r\n\r\n"])
@pytest.mark.parametrize("half", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: loc"])
def test_a_client_that_sends_no_whole_head_is_closed(monkeypatch, before, half):
    monkeypatch.setattr(session_server, "PATIENCE", 0.2)
    monkeypatch.setattr(session_server, "IDLE", 0.2 if before else 60)  # aiohttp's own, which some versions begin late

    async def talk(client, _session, _engine):
        reader, writer = await asyncio.open_connection("127.0.0.1", client.server.port)
        if before:
            writer.write(before % client.server.port)
            assert b" 200 " in await reader.readuntil(b"}")
        writer.write(half)
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()

    conversing(talk, Scripted())


def test_openais_own_client():
    import openai

    async def talk(client, session, engine):
        async with openai.AsyncOpenAI(base_url=client.server.base_url, api_key=client.key) as own:
            create = own.chat.completions.create
            assert [model.id async for model in await own.models.list()] == ["miles"]
            first = await create(model="miles", messages=[USER], tools=TOOLS)
            (call,) = first.choices[0].message.tool_calls
            messages = [USER, first.choices[0].message,
                        {"role": "tool", "tool_call_id": call.id, "content": "3"}]
            second = await create(model="miles", messages=messages, tools=TOOLS, stream=True)
            said = "".join([piece.choices[0].delta.content or "" async for piece in second])
            assert (call.function.name, said) == ("add", "It is 3.")
            messages += [{"role": "assistant", "content": said}, USER]
            third = await create(model="miles", messages=messages, tools=TOOLS)
            messages += [third.choices[0].message.model_dump(), USER]
            await create(model="miles", messages=messages, tools=TOOLS)
            with pytest.raises(openai.ConflictError, match="what it was"):
                await create(model="miles", messages=[{**USER, "content": "?"}], tools=TOOLS)
        assert session.turns == len(engine.requests) == 4

    conversing(talk, Scripted(calls(), "It is 3.", "Yes.", "Bye."), template=TOOLED)


@pytest.mark.parametrize("body, words", [
    (b"", "not JSON"), (b"\xff", "not JSON"), (b"[" * 10**5, "not JSON"), (b"[]", "not a JSON object"),
    ({}, "at least one message"), ({"messages": []}, "at least one message"), ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "robot", "content": ""}]}, "a role"),
    ({"messages": [{"role": "user", "content": 3}]}, "neither text nor images"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "neither text nor images"),
    *(({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": image}]}]}, "not base64")
      for image in ({}, {"url": "http://localhost/a.png"}, {"url": "/etc/hostname"}, {"url": 3})),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:;base64,YQ=="}}]}]},
     "--plugin vision"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": [{"name": "f"}]}]}, "tool_calls of messages[1]"),
    ({"messages": [USER], "n": 2}, "n should be 1"), ({"messages": [USER], "logprobs": True}, "leave logprobs out"),
    ({"messages": [USER], "response_format": {"type": "json_object"}}, "leave response_format out"),
    ({"messages": [USER], "tool_choice": "required"}, "auto or none"),
    ({"messages": [USER], "tools": [{}]}, "tools should"),
    ({"messages": [USER], "functions": [{}]}, "use tools"), ({"messages": [USER], "max_tokens": 0}, "above 0"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
    ({"messages": [{"role": "user", "content": "", "\udfff": 1}]}, "surrogate"),
    (b'{"messages": [{"role": "user", "content": "", "x": ' + b"[" * 900 + b"]" * 900 + b"}]}", "deeper than 64"),
    (b'{"messages": [{"role": "user", "content": "", "x": ' + b"9" * 5000 + b"}]}", "digits"),
    ({"messages": [USER], "max_tokens": "9"}, "above 0"), ({"messages": [USER], "stop": [""]}, "stop should"),
])
def test_what_cannot_be_answered_rightly_is_refused(body, words):
    async def talk(client, session, engine):
        await client.refused(body, 400, words)
        assert not engine.requests and session.failure is None
        await client.ask([USER])  # and nothing of it stays

    conversing(talk, Scripted("seven"))


def test_a_developers_message_is_the_systems():
    """Qwen3's template, as many, leaves out a message whose role it does not know, and says nothing."""
    knows = ("{%- for message in messages %}{%- if message.role in ('system', 'user', 'assistant') %}"
             "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
             "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}")

    async def talk(client, _session, engine):
        await client.ask([{"role": "developer", "content": "be brief"}, USER])
        assert "system\nbe brief" in tokenizer().decode(engine.requests[0].input_ids)

    conversing(talk, Scripted("7"), template=knows)


def test_the_runs_sampling_parameters_win():
    async def talk(client, session, engine):
        status, headers, _ = await client({"messages": [USER], "temperature": 0, "top_p": 1, "seed": 1, "top_k": 0,
                                           "frequency_penalty": 0, "presence_penalty": 0.5})
        assert status == 200 and headers["x-miles-ignored"] == "temperature, presence_penalty, seed"
        assert engine.requests[0].sampling == SamplingParams(temperature=0.7, max_new_tokens=128)
        answer = session.messages[-1]
        status, headers, _ = await client({"messages": [USER, answer, USER], "temperature": 0.7})
        assert status == 200 and "x-miles-ignored" not in headers
        assert session.samples(None)[0].metadata["figures"]["agent/ignored_parameters"] == 1

    conversing(talk, Scripted("seven", "yes"), temperature=0.7)


def test_a_stop_text_ends_an_answer_and_is_not_in_it():
    async def talk(client, session, engine):
        message = (await client.ask([USER], stop=["ven"]))["choices"][0]["message"]
        assert message["content"] == "se" and engine.requests[0].sampling.stop == ("ven",)
        await client.ask([USER, message, USER])
        assert "seven" in tokenizer().decode(engine.requests[1].input_ids)

    conversing(talk, Scripted("seven", "yes"))


def test_a_stop_text_of_the_run_that_is_a_special_token_ends_no_turn():
    async def talk(client, session, engine):
        message = (await client.ask([USER]))["choices"][0]["message"]
        await client.ask([USER, message, USER])
        assert "seven<|endoftext|><|im_end|>\n<|im_start|>user" in tokenizer().decode(engine.requests[1].input_ids)

    conversing(talk, Scripted("seven", "yes", end="<|endoftext|>"), stop=("<|endoftext|>",))


@pytest.mark.parametrize("options", [{"context": 24}, {"max_new_tokens": 10}])
def test_a_conversation_without_room_ends_as_truncated(options):
    async def talk(client, session, engine):
        answer = (await client.ask([USER]))["choices"][0]["message"]
        await client.refused({"messages": [USER, answer, USER]}, 400, "leave no room for an answer")
        assert len(engine.requests) == 1
        sample = session.samples(None)[0]
        assert sample.status is Status.TRUNCATED and sample.response_length == sample.columns["loss_mask"].sum()

    conversing(talk, Scripted("sev"), **options)


def test_a_failure_of_the_agent_is_never_a_sample_to_train_on():
    async def talk(client, session, _engine):
        await client.ask([USER])
        sample = session.samples(Failure("agent_raised", "ValueError: no"))[0]
        assert sample.status is Status.FAILED and sample.response_length == 0 and sample.reward is None
        assert sample.metadata["drop"] == {"reason": "agent_raised",
                                           "detail": "train prompt 3 (row 3), sample 0: ValueError: no"}

    conversing(talk, Scripted("seven"))


def test_an_engine_that_fails_is_kept_for_the_run():
    async def talk(client, session, _engine):
        await client.refused({"messages": [USER]}, 500, "the engine burns")
        await asyncio.wait_for(session.broken(), 20)
        assert isinstance(session.error, EngineError)

    conversing(talk, Scripted(EngineError("the engine burns")))


def test_a_group_that_is_called_back_begins_anew():
    async def talk(client, session, _engine):
        await client.ask([USER])
        session._generation.recall.cancelled = True
        for _ in range(2):
            headers = await client.refused({"messages": [USER, session.messages[-1], USER]}, 503, "will start over")
            assert headers["x-should-retry"] == "false"
        sample = session.samples(None)[0]
        assert sample.status is Status.ABORTED and not sample.metadata and sample.response_length == 0

    conversing(talk, Scripted("seven", "yes"))


def test_ending_a_session_ends_its_call():
    async def talk(client, session, engine):
        engine.gate.clear()
        asking = asyncio.create_task(client({"messages": [USER]}))
        await asyncio.wait_for(engine.asked.wait(), 10)
        await asyncio.wait_for(client.server.close(client.key), 5)
        assert not session.busy
        with pytest.raises((http.client.HTTPException, OSError)):
            await asking

    conversing(talk, Scripted("seven"))
