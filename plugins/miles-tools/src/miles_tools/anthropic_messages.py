"""Anthropic's messages: how a request is read, and how an answer and a refusal are written.

    POST /v1/messages
    POST /v1/messages/count_tokens

A request becomes what OpenAI's protocol would have brought: the system prompt is a message, each result of a tool is
one, and the use of a tool is a call. An answer has blocks of text and of calls; reasoning stays text, as templates
write it, so that a conversation comes back as it was.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from miles_core.stages.rollout import SamplingParams
from miles_tools.session_request import (
    MODEL,
    Asked,
    Refused,
    count,
    function,
    functions,
    ignored,
    listed,
    loaded,
    readable,
    refuse_forced,
    section,
    stops,
)
from miles_tools.trajectory import Completion

ROLES = ("user", "assistant", "system")
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""Why an answer ends, by OpenAI's words."""
KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
         413: "request_too_large"}
"""Errors by status; all others are "api_error"."""
BILLING = "x-anthropic-billing-header:"
"""How a block of the system prompt begins that Claude Code means for the service: it is another one each time."""


def parse(body: bytes, sampling: SamplingParams) -> Asked:
    """Read a request.

    Raises:
        Refused: 400, not JSON, malformed, or asking for what a session does not give.
    """
    data, images = loaded(body), dict[str, bytes]()
    choice = data.get("tool_choice")
    choice = choice.get("type") if isinstance(choice, dict) else choice
    refuse_forced(choice, "output_format", data.get("output_format") or section(data, "output_config").get("format"))
    raw = [*_system(data.get("system")),
           *(one for i, message in enumerate(listed(data)) for one in _messages(message, f"messages[{i}]"))]
    thinks = section(data, "thinking").get("type") not in (None, "disabled")
    return Asked(
        messages=tuple(readable(message, f"messages[{i}]", images) for i, message in enumerate(raw)), images=images,
        tools=_tools(data.get("tools")), calls=choice != "none",
        stop=stops(data.get("stop_sequences")),
        max_tokens=None if data.get("max_tokens") is None else count(data, "max_tokens"),
        stream=bool(data.get("stream")),
        ignored=(*ignored(data, sampling), *(["thinking"] if thinks else [])))  # fmt: skip


def refusal(refused: Refused) -> dict[str, Any]:
    """Why a request is not answered. Agents that summarise what has become too long look for these words."""
    full = "prompt is too long: " if refused.code == "context_length_exceeded" else ""
    return {"type": "error", "error": {"type": KINDS.get(refused.status, "api_error"),
                                       "message": full + refused.sentence}}


def whole(completion: Completion, _chat: Asked) -> dict[str, Any]:
    """An answer in one piece."""
    return {**_head(completion), "content": _blocks(completion), "stop_reason": _reason(completion),
            "stop_sequence": completion.stopped_by,
            "usage": {"input_tokens": completion.prompt_tokens, "output_tokens": completion.completion_tokens}}


def events(completion: Completion, _chat: Asked) -> Iterator[str]:
    """An answer as a stream: its blocks, its end, and how many tokens it has."""
    usage = {"input_tokens": completion.prompt_tokens, "output_tokens": 0}
    yield _event("message_start", message={**_head(completion), "content": [], "stop_reason": None,
                                           "stop_sequence": None, "usage": usage})
    for index, block in enumerate(_blocks(completion)):
        if block["type"] == "text":
            empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            empty, delta = {**block, "input": {}}, {"type": "input_json_delta",
                                                    "partial_json": json.dumps(block["input"])}
        yield _event("content_block_start", index=index, content_block=empty)
        yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    yield _event("message_delta", delta={"stop_reason": _reason(completion), "stop_sequence": completion.stopped_by},
                 usage={"output_tokens": completion.completion_tokens})
    yield _event("message_stop")


def _system(system: object) -> Iterator[dict[str, Any]]:
    """The system prompt as a message; its blocks are paragraphs."""
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system or []
    if not isinstance(blocks, list) or not all(
            isinstance(block, dict) and isinstance(block.get("text"), str) for block in blocks):
        raise Refused(400, "system should be a text or a list of blocks of text")
    if texts := [block["text"] for block in blocks if not block["text"].startswith(BILLING)]:
        yield {"role": "system", "content": "\n\n".join(texts)}


def _messages(message: object, where: str) -> Iterator[dict[str, Any]]:
    """A message in OpenAI's form; each result of a tool is a message of its own."""
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(message, dict) or role not in ROLES:
        raise Refused(400, f"{where} should be an object with a role: {', '.join(ROLES)}")
    content = message.get("content")
    if not isinstance(content, list):
        yield {"role": role, "content": content}
        return
    parts: list[Any] = []
    calls: list[dict[str, Any]] = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if role == "assistant" and kind == "tool_use":
            calls.append(_call(block))
        elif role == "user" and kind == "tool_result":
            if parts:
                yield {"role": role, "content": parts}
            parts = []
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _parts(block.get("content"))}
        else:
            parts.append(_part(block))
    if role == "assistant" or parts or not content:
        yield {"role": role, "content": parts, "tool_calls": calls} if calls else {"role": role, "content": parts}


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": block.get("id"), "type": "function",
            "function": {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}}


def _parts(content: object) -> object:
    return [_part(block) for block in content] if isinstance(content, list) else content


def _part(block: Any) -> Any:
    """A block as a part of OpenAI's content; what it is not is refused where messages are read."""
    source = block.get("source") if isinstance(block, dict) and block.get("type") == "image" else None
    if not isinstance(source, dict):
        return block
    address = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
    return {"type": "image_url", "image_url": {"url": address}}


def _tools(tools: object) -> tuple[Mapping[str, object], ...]:
    """Tools as OpenAI describes them.

    Raises:
        Refused: 400, malformed, or one that the service itself would run.
    """
    tools = tools or []
    if not isinstance(tools, list) or not all(
            isinstance(tool, dict) and tool.get("type", "custom") == "custom" for tool in tools):
        raise Refused(400, "tools should be a list of {name, description, input_schema}; none is run here")
    return functions([function(tool.get("name"), tool.get("description"), tool.get("input_schema")) for tool in tools])


def _head(completion: Completion) -> dict[str, Any]:
    return {"id": f"msg_{completion.number}", "type": "message", "role": "assistant", "model": MODEL}


def _blocks(completion: Completion) -> list[dict[str, Any]]:
    message = completion.message
    calls: Sequence[Any] = message.get("tool_calls", ())
    text = [{"type": "text", "text": message["content"]}] if message["content"] or not calls else []
    return [*text, *({"type": "tool_use", "id": call["id"], "name": call["function"]["name"],
                      "input": json.loads(call["function"]["arguments"])} for call in calls)]


def _reason(completion: Completion) -> str:
    stopped = completion.stopped_by is not None and completion.finish_reason == "stop"
    return "stop_sequence" if stopped else REASONS[completion.finish_reason]


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"
