"""OpenAI's responses: how a request is read, and how an answer and a refusal are written.

    POST /v1/responses

A request becomes what chat completions would have brought: instructions are the system message, an assistant's text and
the calls behind it are one message, and the output of a call is one of the role tool. Nothing is stored here, so every
request brings the whole conversation.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from miles_core.stages.rollout import SamplingParams
from miles_tools.openai_chat import refusal, refuse_unsupported
from miles_tools.session_request import (
    MODEL,
    Asked,
    Message,
    Refused,
    count,
    function,
    functions,
    ignored,
    listed,
    loaded,
    readable,
    section,
)
from miles_tools.trajectory import Completion

__all__ = ["events", "parse", "refusal", "whole"]
ROLES = ("user", "assistant", "system", "developer")
STORED = ("previous_response_id", "conversation", "prompt", "background")
"""What refers to something that the service keeps."""
NAMED = ("function", "custom", "namespace")
LEFT_OUT = ("web_search", "tool_search")
"""Tools that Codex lists whether or not they are wanted; the model is not told of them."""
CUSTOM = "custom_tool_call"
"""The call of a tool that takes a text."""


def parse(body: bytes, sampling: SamplingParams) -> Asked:
    """Read a request.

    Raises:
        Refused: 400, not JSON, malformed, or asking for what a session does not give.
    """
    data, images = loaded(body), dict[str, bytes]()
    text, reasoning = section(data, "text"), section(data, "reasoning")
    _refuse_others(data, text)
    tools = list(_tools(data.get("tools")))
    return Asked(
        messages=tuple(_messages(data, images)), images=images,
        tools=functions([tool for tool, _ in tools if tool]), calls=data.get("tool_choice") != "none",
        called_as={tool["function"]["name"]: own for tool, own in tools if tool},
        max_tokens=None if data.get("max_output_tokens") is None else count(data, "max_output_tokens"),
        stream=bool(data.get("stream")),
        ignored=(*ignored(data, sampling), *(["reasoning"] if reasoning.get("effort") not in (None, "none") else []),
                 *(["verbosity"] if text.get("verbosity") else []),
                 *(own["type"] for tool, own in tools if not tool)))  # fmt: skip


def whole(completion: Completion, chat: Asked) -> dict[str, Any]:
    """An answer in one piece."""
    return {**_head(completion), "output": _items(completion, chat), "status": _status(completion),
            "incomplete_details": {"reason": "max_output_tokens"} if completion.finish_reason == "length" else None,
            "usage": _usage(completion)}


def events(completion: Completion, chat: Asked) -> Iterator[str]:
    """An answer as a stream: its items, and all of it once more.

    One that is cut ends with response.completed too, and its status says so: at response.incomplete Codex gives up with
    an error, and the stream of OpenAI's own client has no final response.
    """
    for number, (kind, fields) in enumerate(_events(completion, chat)):
        yield f"event: {kind}\ndata: {json.dumps({'type': kind, 'sequence_number': number, **fields})}\n\n"


def _events(completion: Completion, chat: Asked) -> Iterator[tuple[str, dict[str, Any]]]:
    begun = {**_head(completion), "output": [], "status": "in_progress", "incomplete_details": None, "usage": None}
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for index, item in enumerate(_items(completion, chat)):
        empty, steps = _steps(item)
        yield "response.output_item.added", {"output_index": index, "item": {**item, "status": "in_progress", **empty}}
        for step, fields in steps:
            yield f"response.{step}", {"output_index": index, "item_id": item["id"], **fields}
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield "response.completed", {"response": whole(completion, chat)}


def _steps(item: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]:
    """An item of which nothing is there yet, and how it comes."""
    if item["type"] == "message":
        (part,) = item["content"]
        text, place = part["text"], {"content_index": 0}
        return {"content": []}, [
            ("content_part.added", {**place, "part": {**part, "text": ""}}),
            ("output_text.delta", {**place, "delta": text, "logprobs": []}),
            ("output_text.done", {**place, "text": text, "logprobs": []}),
            ("content_part.done", {**place, "part": part})]
    key = "input" if item["type"] == CUSTOM else "arguments"
    kind = f"{item['type']}_{key}"
    return {key: ""}, [(f"{kind}.delta", {"delta": item[key]}), (f"{kind}.done", {key: item[key]})]


def _refuse_others(data: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    """What is not given here, where leaving it out would answer another question."""
    if stored := [key for key in STORED if data.get(key)]:
        raise Refused(400, f"nothing is stored here: leave {stored[0]} out, and send the whole conversation as input",
                      "unsupported_parameter")
    include = data.get("include") or []
    if not isinstance(include, list) or "message.output_text.logprobs" in include:
        raise Refused(400, "include should be a list, and not ask for log-probs: they are kept for training",
                      "unsupported_parameter")
    refuse_unsupported(data, "text.format", text.get("format"))


def _messages(data: Mapping[str, Any], images: dict[str, bytes]) -> list[Message]:
    """Instructions and items as messages.

    What comes before the first question is one message, its parts are paragraphs: there are templates that take no
    second one of the system's.
    """
    items, instructions = data.get("input"), data.get("instructions")
    items = [{"role": "user", "content": items}] if isinstance(items, str) else listed(data, "input")
    messages: list[Message] = []
    if instructions:
        messages.append(readable({"role": "system", "content": instructions}, "instructions", images))
    for i, item in enumerate(items):
        if isinstance(item, dict) and item.get("type") == "reasoning":
            continue  # of another model: here reasoning is text
        message = readable(_message(item, f"input[{i}]"), f"input[{i}]", images)
        roles = [one["role"] for one in messages]
        if roles[-1:] == ["assistant"] and "tool_calls" in message:
            messages[-1]["tool_calls"] = [*messages[-1].get("tool_calls", ()), *message["tool_calls"]]
        elif [*roles, message["role"]] == ["system", "system"] and not images:
            messages[0]["content"] += f"\n\n{message['content']}"
        else:
            messages.append(message)
    return listed({"messages": messages})


def _message(item: Any, where: str) -> dict[str, Any]:
    """An item as a message of chat completions; what it is not is refused where messages are read."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message" and item.get("role") in ROLES:
        return {"role": item["role"], "content": _parts(item.get("content"))}
    if kind == "function_call":
        return _call(item, item.get("arguments"))
    if kind == CUSTOM:
        text = item.get("input")
        return _call(item, json.dumps({"input": text}) if isinstance(text, str) else None)
    if kind in ("function_call_output", f"{CUSTOM}_output"):
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": _parts(item.get("output"))}
    raise Refused(400, f"{where} should be a message with a role ({', '.join(ROLES)}), a call of a function or of a "
                       "custom tool, or its output")


def _call(item: Mapping[str, Any], arguments: object) -> dict[str, Any]:
    name = f"{item['namespace']}.{item.get('name')}" if item.get("namespace") else item.get("name")
    return {"role": "assistant", "content": "", "tool_calls": [
        {"id": item.get("call_id"), "type": "function", "function": {"name": name, "arguments": arguments}}]}


def _parts(content: object) -> object:
    return [_part(part) for part in content] if isinstance(content, list) else content


def _part(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("input_text", "output_text"):
        return {**part, "type": "text"}
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    return part


def _tools(tools: object, namespace: str = "") -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """Tools as chat completions describe them, empty for those that are left out, and how their calls are written here.

    A custom tool is a function of one text. Its grammar is told to the model and not enforced.

    Raises:
        Refused: 400, malformed, or one that is run by the service or called in a form of its own.
    """
    tools = tools or []
    if not isinstance(tools, list) or not all(
            isinstance(tool, dict) and (isinstance(tool.get("name"), str) or tool.get("type") not in NAMED)
            for tool in tools):
        raise Refused(400, "tools should be a list of {type: function, name, parameters}")
    for tool in tools:
        kind, name, description = str(tool.get("type")), tool.get("name", ""), tool.get("description")
        own = {"type": kind, "name": name, **({"namespace": namespace} if namespace else {})}
        full = f"{namespace}.{name}" if namespace else name
        if kind == "namespace" and not namespace:
            yield from _tools(tool.get("tools"), name)
        elif kind == "function":
            yield function(full, description, tool.get("parameters")), {**own, "type": "function_call"}
        elif kind == "custom":
            grammar = section(tool, "format").get("definition")
            text = {"type": "string", **({"description": grammar} if grammar else {})}
            parameters = {"type": "object", "properties": {"input": text}, "required": ["input"]}
            yield function(full, description, parameters), {**own, "type": CUSTOM}
        elif kind in LEFT_OUT:
            yield {}, own
        else:
            raise Refused(400, f"tools of the type {kind} are neither functions nor custom ones; none is run here")


def _head(completion: Completion) -> dict[str, Any]:
    return {"id": f"resp_{completion.number}", "object": "response", "created_at": int(time.time()), "model": MODEL,
            "error": None, "instructions": None, "metadata": {}, "parallel_tool_calls": True, "tool_choice": "auto",
            "tools": []}


def _status(completion: Completion) -> str:
    return "incomplete" if completion.finish_reason == "length" else "completed"


def _usage(completion: Completion) -> dict[str, Any]:
    return {"input_tokens": completion.prompt_tokens, "output_tokens": completion.completion_tokens,
            "total_tokens": completion.prompt_tokens + completion.completion_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0}}


def _items(completion: Completion, chat: Asked) -> list[dict[str, Any]]:
    message, status = completion.message, _status(completion)
    calls = message.get("tool_calls", ())
    part = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}
    text = [{"type": "message", "id": f"msg_{completion.number}", "role": "assistant", "status": status,
             "content": [part]}] if message["content"] or not calls else []
    return [*text, *({"id": f"fc_{completion.number}_{i}", "call_id": call["id"], "status": status,
                      **_called(call["function"], chat)} for i, call in enumerate(calls))]


def _called(called: Mapping[str, str], chat: Asked) -> dict[str, Any]:
    """A call in the form of its tool; one of a custom tool with other arguments than a text stays one of a function."""
    own, arguments = chat.called_as.get(called["name"], {}), json.loads(called["arguments"])
    if own.get("type") == CUSTOM and [*arguments] == ["input"] and isinstance(arguments["input"], str):
        return {**own, "input": arguments["input"]}
    return {"name": called["name"], **own, "type": "function_call", "arguments": called["arguments"]}
