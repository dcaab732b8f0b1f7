"""OpenAI's chat completions: how a request is read, and how an answer and a refusal are written.

    POST /v1/chat/completions
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from miles_core.stages.rollout import SamplingParams
from miles_tools.session_request import (
    MODEL,
    Asked,
    Refused,
    count,
    functions,
    ignored,
    listed,
    loaded,
    readable,
    refuse_forced,
    stops,
)
from miles_tools.trajectory import Completion


def parse(body: bytes, sampling: SamplingParams) -> Asked:
    """Read a request.

    Raises:
        Refused: 400, not JSON, malformed, or asking for what a session does not give.
    """
    data = loaded(body)
    _refuse_others(data)
    bounds = [count(data, key) for key in ("max_tokens", "max_completion_tokens") if data.get(key) is not None]
    options, images = data.get("stream_options") or {}, dict[str, bytes]()
    return Asked(
        messages=tuple(readable(message, f"messages[{i}]", images) for i, message in enumerate(listed(data))),
        images=images,
        tools=functions(data.get("tools") or []), calls=data.get("tool_choice") != "none",
        stop=stops(data.get("stop")), max_tokens=min(bounds, default=None),
        stream=bool(data.get("stream")), ignored=ignored(data, sampling),
        include_usage=isinstance(options, dict) and bool(options.get("include_usage")))  # fmt: skip


def _refuse_others(data: Mapping[str, object]) -> None:
    """What is not given here, where leaving it out would answer another question."""
    if data.get("n") not in (None, 1):
        raise Refused(400, "a session is one conversation: n should be 1", "unsupported_parameter")
    refuse_unsupported(data, "response_format", data.get("response_format"))
    if data.get("functions") or data.get("function_call"):
        raise Refused(400, "functions are replaced by tools: use tools", "unsupported_parameter")


def refuse_unsupported(data: Mapping[str, object], key: str, form: object) -> None:
    """What neither of OpenAI's protocols gives here.

    Raises:
        Refused: 400, for log-probs, a forced tool, or the form that is asked for under this key.
    """
    if data.get("logprobs") or data.get("top_logprobs"):
        raise Refused(400, "log-probs are kept for training and not given: leave logprobs out", "unsupported_parameter")
    refuse_forced(data.get("tool_choice"), key, None if form == {"type": "text"} else form)


def refusal(refused: Refused) -> dict[str, Any]:
    """Why a request is not answered."""
    return {"error": {"message": refused.sentence, "type": refused.code, "code": refused.code, "param": None}}


def whole(completion: Completion, _chat: Asked) -> dict[str, Any]:
    """An answer in one piece."""
    return {**_head(completion, "chat.completion"), "usage": _usage(completion), "choices": [
        {"index": 0, "message": _shown(completion), "logprobs": None, "finish_reason": completion.finish_reason}]}


def _head(completion: Completion, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{completion.number}", "object": kind, "created": int(time.time()), "model": MODEL}


def _shown(completion: Completion) -> dict[str, Any]:
    message = completion.message
    return {**message, "content": message["content"] or (None if "tool_calls" in message else "")}


def _usage(completion: Completion) -> dict[str, int]:
    return {"prompt_tokens": completion.prompt_tokens, "completion_tokens": completion.completion_tokens,
            "total_tokens": completion.prompt_tokens + completion.completion_tokens}


def events(completion: Completion, chat: Asked) -> Iterator[str]:
    """An answer as a stream: the message, its end, and how many tokens it has."""
    head, message = _head(completion, "chat.completion.chunk"), _shown(completion)
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    for delta, reason in ((message, None), ({}, completion.finish_reason)):
        yield _event({**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]})
    if chat.include_usage:
        yield _event({**head, "choices": [], "usage": _usage(completion)})
    yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"
