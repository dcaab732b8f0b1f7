"""The endpoint in Anthropic's form, by a plain client and by Anthropic's own."""

import base64
import json

import pytest
from endpoint import TOOLED, USER, Scripted, calls, conversing, new_session
from miles_tools.anthropic_messages import parse

from miles_core.types import Status

TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}
PATH = "/v1/messages"


def read(body):
    return parse(json.dumps({"max_tokens": 9, **body}).encode(), new_session(None).sampling)


def test_a_request_is_what_openais_would_be():
    image = base64.b64encode(b"an image").decode()
    asked = read({
        "system": [{"type": "text", "text": "x-anthropic-billing-header: cc=1"}, {"type": "text", "text": "Be kind."},
                   {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "3+4="}, {"type": "image", "source": {
                "type": "base64", "media_type": "image/png", "data": image}}]},
            {"role": "assistant", "content": [{"type": "text", "text": "I add."}, {
                "type": "tool_use", "id": "call_0_0", "name": "add", "input": {"a": 3}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "call_0_0", "content": [{"type": "text", "text": "7"}]},
                {"type": "text", "text": "Go on."}]}],
        "tools": [TOOL], "stop_sequences": ["!"], "thinking": {"type": "enabled", "budget_tokens": 1024}})
    system, question, call, result, more = asked.messages
    assert system == {"role": "system", "content": "Be kind.\n\nBe brief."}
    assert [part["type"] for part in question["content"]] == ["text", "image"]
    assert list(asked.images.values()) == [b"an image"]
    assert call == {"role": "assistant", "content": "I add.", "tool_calls": [
        {"id": "call_0_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}}]}
    assert result == {"role": "tool", "content": "7", "tool_call_id": "call_0_0"}
    assert more == {"role": "user", "content": "Go on."}
    assert asked.tools == ({"type": "function", "function": {
        "name": "add", "description": "Adds.", "parameters": TOOL["input_schema"]}},)
    assert (asked.stop, asked.max_tokens, asked.ignored) == (("!",), 9, ("thinking",))


def test_anthropics_own_client():
    import anthropic

    async def talk(client, session, engine):
        address = client.server.base_url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=address, api_key=client.key, auth_token=None) as own:
            given = {"model": "miles", "max_tokens": 64, "tools": [TOOL]}
            counted = await own.messages.count_tokens(model="miles", messages=[USER], tools=[TOOL])
            first = await own.messages.create(messages=[USER], **given)
            assert counted.input_tokens == first.usage.input_tokens == len(engine.requests[0].input_ids)
            text, call = first.content
            assert (text.text, call.name, call.input) == ("I add.", "add", {"a": 1.0, "b": 2})
            assert first.stop_reason == "tool_use"
            used = {**call.model_dump(include={"type", "id", "name"}), "input": {"a": 1, "b": 2}}  # as in JavaScript
            messages = [USER, {"role": "assistant", "content": [text.model_dump(), used]}, {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": call.id, "content": "3"}]}]
            async with own.messages.stream(messages=messages, **given) as stream:
                said = "".join([piece async for piece in stream.text_stream])
                final = await stream.get_final_message()
            assert said == final.content[0].text == "It is 3." and final.stop_reason == "end_turn"
            assert final.usage.input_tokens == len(engine.requests[1].input_ids)
            messages += [{"role": "assistant", "content": said}, USER]
            third = await own.messages.create(messages=messages, stop_sequences=["e"], **given)
            assert (third.content[0].text, third.stop_reason, third.stop_sequence) == ("Y", "stop_sequence", "e")
            async with own.messages.stream(messages=[*messages, {"role": "assistant", "content": "Y"}, USER],
                                           **given) as stream:
                again = await stream.get_final_message()
            assert again.content[1].input == {"a": 1, "b": 2} and again.stop_reason == "tool_use"
            with pytest.raises(anthropic.ConflictError, match="what it was"):
                await own.messages.create(messages=[{**USER, "content": "?"}], **given)
        assert session.turns == len(engine.requests) == 4

    conversing(talk, Scripted(calls(arguments='{"a": 1.0, "b": 2}'), "It is 3.", "Yes.", calls()), template=TOOLED,
               context=2048, max_new_tokens=1024)


@pytest.mark.parametrize(("body", "words"), [
    ({"messages": []}, "at least one message"), ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "tool", "content": "3"}]}, "user, assistant, system"),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "neither text nor images"),
    ({"messages": [{"role": "user", "content": [3]}]}, "neither text nor images"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": 3}]}]}, "tool_calls of messages[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {
        "type": "url", "url": "http://localhost/a.png"}}]}]}, "not base64"),
    ({"messages": [USER], "system": 3}, "system should"), ({"messages": [USER], "system": [{}]}, "system should"),
    ({"messages": [USER], "tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "none is run here"),
    ({"messages": [USER], "tools": [{}]}, "tools should"), ({"messages": [USER], "tools": 3}, "tools should"),
    ({"messages": [USER], "tool_choice": {"type": "any"}}, "auto or none"),
    ({"messages": [USER], "output_format": {"type": "json_schema"}}, "forced format"),
    ({"messages": [USER], "output_config": 3}, "output_config"), ({"messages": [USER], "thinking": 3}, "thinking"),
    ({"messages": [USER], "max_tokens": 0}, "above 0"), ({"messages": [USER], "stop_sequences": [""]}, "stop should"),
])
def test_what_cannot_be_answered_rightly_is_refused(body, words):
    async def talk(client, session, engine):
        for path in (PATH, f"{PATH}/count_tokens"):
            status, _, text = await client(body, path)
            answer = json.loads(text)
            assert status == 400 and answer["type"] == "error", text
            assert words in answer["error"]["message"] and answer["error"]["type"] == "invalid_request_error"
        assert not engine.requests and session.failure is None

    conversing(talk, Scripted())


def test_a_conversation_without_room_says_so_in_their_words():
    """Agents summarise a conversation when they read this."""
    async def talk(client, session, _engine):
        status, _, text = await client({"messages": [{"role": "user", "content": "9" * 200}], "max_tokens": 9}, PATH)
        assert status == 400 and json.loads(text)["error"]["message"].startswith("prompt is too long: ")
        (sample,) = session.samples(None)
        assert sample.status is Status.FAILED and sample.metadata["drop"]["reason"] == "agent_out_of_context"

    conversing(talk, Scripted(), context=128)


def test_a_key_is_a_sessions():
    async def talk(client, _session, _engine):
        assert (await client({"messages": [USER]}, PATH, Authorization=None, x_api_key=client.key))[0] == 200
        status, _, text = await client({"messages": [USER]}, PATH, Authorization=None, x_api_key="wrong.key")
        assert status == 401 and json.loads(text)["error"]["type"] == "authentication_error"

    conversing(talk, Scripted("seven"))
