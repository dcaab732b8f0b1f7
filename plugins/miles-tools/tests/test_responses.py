"""The endpoint in the form of OpenAI's responses, by a plain client and by OpenAI's own."""

import base64
import json

import pytest
from endpoint import TOOLED, USER, Scripted, calls, conversing, new_session
from miles_tools import openai_responses
from miles_tools.openai_responses import parse
from miles_tools.trajectory import Completion

from miles_core.types import Status

TOOL = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
PATCH = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"}}
TEAM = {"type": "namespace", "name": "team", "description": "Others.", "tools": [TOOL]}
PATH = "/v1/responses"


def read(**body):
    return parse(json.dumps(body).encode(), new_session(None).sampling)


def said(text, role="user", kind="input_text"):
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def test_a_request_is_what_chat_completions_would_be():
    """Written as Codex does."""
    image = "data:image/png;base64," + base64.b64encode(b"an image").decode()
    asked = read(
        instructions="Be kind.", store=False, include=["reasoning.encrypted_content"], reasoning={"summary": "auto"},
        input=[said("Be brief.", "developer"), said("Answer.", "system"),
               {"role": "user", "content": [{"type": "input_text", "text": "3+4="},
                                            {"type": "input_image", "image_url": image, "detail": "auto"}]},
               {"type": "reasoning", "summary": [], "encrypted_content": "?"},
               said("I add.", "assistant", "output_text"),
               {"type": "function_call", "id": "fc_0", "call_id": "c0", "name": "add", "arguments": '{"a": 3}'},
               {"type": "function_call", "call_id": "c1", "name": "add", "namespace": "team", "arguments": "{}"},
               {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "a\n"},
               {"type": "function_call_output", "call_id": "c0", "output": "7"},
               {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "ok"}]},
               said("Go on.", "developer")],
        tools=[TOOL, TEAM, PATCH, {"type": "web_search", "external_web_access": False}], tool_choice="auto",
        max_output_tokens=9, parallel_tool_calls=True, stream=True)
    system, question, call, *results, more = asked.messages
    assert system == {"role": "system", "content": "Be kind.\n\nBe brief.\n\nAnswer."}
    assert [part["type"] for part in question["content"]] == ["text", "image"]
    assert list(asked.images.values()) == [b"an image"]
    called = [("add", '{"a": 3}'), ("team.add", "{}"), ("patch", '{"input": "a\\n"}')]
    assert call == {"role": "assistant", "content": "I add.", "tool_calls": [
        {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(called)]}
    assert results == [{"role": "tool", "content": "7", "tool_call_id": "c0"},
                       {"role": "tool", "content": "ok", "tool_call_id": "c2"}]
    assert more == {"role": "system", "content": "Go on."}
    assert [tool["function"] for tool in asked.tools] == [
        {"name": "add", "description": "Adds.", "parameters": TOOL["parameters"]},
        {"name": "team.add", "description": "Adds.", "parameters": TOOL["parameters"]},
        {"name": "patch", "parameters": {"type": "object", "required": ["input"], "properties": {
            "input": {"type": "string", "description": "start: x"}}}}]
    assert (asked.max_tokens, asked.stream, asked.calls, asked.ignored) == (9, True, True, ("web_search",))


def test_an_image_of_the_systems_is_no_paragraph():
    image = {"type": "input_image", "image_url": base64.b64encode(b"an image").decode()}
    systems = [{"role": "developer", "content": content} for content in ("Be kind.", [image], "Be brief.")]
    assert [len(one["content"]) for one in read(input=[*systems, USER]).messages] == [8, 1, 9, 4]


@pytest.mark.parametrize("text", ["I call.", "", " \n"])
@pytest.mark.parametrize("called", [
    [], [("add", {"a": 1.0, "b": {"c": [None, "é"]}})], [("add", {}), ("team.add", {"a": 2}), ("add", {"a": 3})],
    [("patch", {"input": '{"input": "a"}'})], [("patch", {"patch": "a"})], [("patch", {"input": 3})], [("patch", {})],
    [("nothing", {}), ("no.such", {})], [("patch", {"input": "a", "more": 1}), ("patch", {"input": ""})],
])
def test_an_answer_comes_back_as_it_was(text, called):
    """Whatever tools the model calls, rightly or not; else the conversation would be another one."""
    message = {"role": "assistant", "content": text}
    if called:
        message["tool_calls"] = [{"id": f"call_0_{i}", "type": "function", "function": {
            "name": name, "arguments": json.dumps(arguments)}} for i, (name, arguments) in enumerate(called)]
    tools = [TOOL, TEAM, PATCH]
    answer = openai_responses.whole(Completion(message, "stop", 3, 4, 0), read(input="3+4=", tools=tools))
    assert read(input=[USER, *answer["output"]], tools=tools).messages[1:] == (message,)
    assert len({item["id"] for item in answer["output"]}) == len(answer["output"]) == max(bool(text) + len(called), 1)
    right = {"name": "patch", "input": '{"input": "a"}', "type": "custom_tool_call"}
    if called and called[0][1] == {"input": right["input"]}:
        assert {key: answer["output"][-1][key] for key in right} == right


def test_openais_own_client():
    import openai

    async def talk(client, session, engine):
        async with openai.AsyncOpenAI(base_url=client.server.base_url, api_key=client.key) as own:
            options = {"model": "miles", "tools": [TOOL, PATCH], "store": False}
            first = await own.responses.create(input="3+4=", instructions="Be kind.", **options)
            message, call = first.output
            assert (first.output_text, call.name, json.loads(call.arguments)) == ("I add.", "add", {"a": 1.0, "b": 2})
            assert first.status == message.status == "completed" and first.incomplete_details is None
            assert first.usage.input_tokens == len(engine.requests[0].input_ids)
            written = {**call.model_dump(exclude_none=True), "arguments": '{"a":1,"b":2}'}  # as in JavaScript
            items = [{"role": "user", "content": "3+4="}, message.model_dump(exclude_none=True), written,
                     {"type": "function_call_output", "call_id": call.call_id, "output": "3"}]
            async with own.responses.stream(input=items, instructions="Be kind.", **options) as stream:
                seen = [event async for event in stream]
                second = await stream.get_final_response()
            assert [event.type for event in seen] == [f"response.{kind}" for kind in (
                "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
                "output_text.done", "content_part.done", "output_item.done", "completed")]
            assert [event.sequence_number for event in seen] == list(range(len(seen)))
            assert second.output_text == "It is 3." and second.usage.total_tokens > second.usage.input_tokens
            items += [*second.model_dump(exclude_none=True)["output"], USER]
            async with own.responses.stream(input=items, instructions="Be kind.", **options) as stream:
                seen = [event async for event in stream]
                third = await stream.get_final_response()
            snapshots = [event.snapshot for event in seen if event.type.endswith("arguments.delta")]
            assert snapshots == [third.output[1].arguments] and third.output[2].input == "a\n"
            assert [event.input for event in seen if event.type.endswith("input.done")] == ["a\n"]
            items += [*third.model_dump(exclude_none=True)["output"], {
                "type": "custom_tool_call_output", "call_id": third.output[2].call_id, "output": "ok"}]
            await own.responses.create(input=items, instructions="Be kind.", **options)
            with pytest.raises(openai.ConflictError, match="what it was"):
                await own.responses.create(input="?", **options)
        assert session.turns == len(engine.requests) == 4

    patch = '<tool_call>{"name": "patch", "arguments": {"input": "a\\n"}}</tool_call>'
    conversing(talk, Scripted(calls(arguments='{"a": 1.0, "b": 2}'), "It is 3.", calls() + patch, "Done."),
               template=TOOLED, context=4096, max_new_tokens=2048)


def test_an_answer_that_is_cut_says_so():
    """Streamed or not, and is an answer to the client all the same."""
    import openai

    async def talk(client, session, engine):
        async with openai.AsyncOpenAI(base_url=client.server.base_url, api_key=client.key) as own:
            options = {"model": "miles", "max_output_tokens": 5}
            first = await own.responses.create(input="3+4=", **options)
            items = [{"role": "user", "content": "3+4="}, *first.model_dump(exclude_none=True)["output"], USER]
            async with own.responses.stream(input=items, **options) as stream:
                second = await stream.get_final_response()
            for answer in (first, second):
                assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
                assert answer.output_text == "seven" and answer.output[0].status == "incomplete"
        assert [request.sampling.max_new_tokens for request in engine.requests] == [5, 5]
        assert session.samples(None)[0].status is Status.TRUNCATED

    conversing(talk, Scripted("seven", "seven", end=""))


@pytest.mark.parametrize(("body", "words"), [
    ({"input": []}, "input should"), ({"input": 3}, "input should"), ({}, "input should"),
    ({"input": ["hi"]}, "input[0]"), ({"input": [{"role": "tool", "content": "3"}]}, "developer"),
    ({"input": [{"type": "item_reference", "id": "msg_0"}]}, "input[0]"),
    ({"input": [{"type": "reasoning"}]}, "at least one"),
    ({"input": [USER, {"type": "web_search_call", "id": "ws_0"}]}, "input[1]"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "neither text nor images"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "neither text nor images"),
    ({"input": [{"role": "user", "content": [3]}]}, "neither text nor images"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "neither text nor images"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://localhost/a.png"}]}]},
     "not base64"),
    ({"input": [{"type": "function_call", "name": 3}]}, "tool_calls of input[0]"),
    ({"input": [{"type": "custom_tool_call", "name": "patch", "input": 3}]}, "tool_calls of input[0]"),
    ({"instructions": 3}, "instructions"), ({"tools": 3}, "tools should"), ({"tools": [3]}, "tools should"),
    ({"tools": [{"type": "function", "name": 3}]}, "tools should"), ({"tools": [{"type": "function"}]}, "tools should"),
    ({"tools": [{"type": "namespace", "name": "a", "tools": 3}]}, "tools should"),
    ({"tools": [{**TEAM, "tools": [TEAM]}]}, "namespace"),
    ({"tools": [{"type": "custom", "name": "a", "format": 3}]}, "format"),
    ({"tools": [{"type": "local_shell"}]}, "local_shell"), ({"tools": [{"type": "code_interpreter"}]}, "code_interp"),
    ({"tool_choice": "required"}, "auto or none"), ({"tool_choice": {"type": "function", "name": "a"}}, "auto or none"),
    ({"text": {"format": {"type": "json_schema"}}}, "forced format"), ({"text": 3}, "text should"),
    ({"reasoning": 3}, "reasoning should"), ({"max_output_tokens": 0}, "above 0"), ({"top_logprobs": 2}, "log-probs"),
    ({"include": ["message.output_text.logprobs"]}, "log-probs"), ({"include": 3}, "include should"),
    ({"previous_response_id": "resp_0"}, "previous_response_id"), ({"conversation": "c"}, "conversation"),
    ({"background": True}, "background"), ({"prompt": {"id": "p"}}, "prompt"),
])
def test_what_cannot_be_answered_rightly_is_refused(body, words):
    async def talk(client, session, engine):
        status, _, text = await client({**({} if not body else {"input": "3+4="}), **body}, PATH)
        error = json.loads(text)["error"]
        assert status == 400 and error["type"] and error["code"], text
        assert words in error["message"]
        assert not engine.requests and session.failure is None

    conversing(talk, Scripted())


def test_a_conversation_without_room_says_so_by_the_code():
    """Codex summarises, or ends with a word of its own, when it reads it."""
    async def talk(client, session, _engine):
        status, _, text = await client({"input": "9" * 200}, PATH)
        assert status == 400 and json.loads(text)["error"]["code"] == "context_length_exceeded"
        (sample,) = session.samples(None)
        assert sample.status is Status.FAILED and sample.metadata["drop"]["reason"] == "agent_out_of_context"

    conversing(talk, Scripted(), context=128)
