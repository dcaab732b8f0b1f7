"""What an agent asks, whatever protocol it speaks, read strictly where the answer would be wrong otherwise.

Sampling parameters are the run's. An agent that sends others is not refused, for many do out of habit; they are left
out and counted. What cannot be left out without a wrong answer (several choices, a forced tool, a forced format) is
refused.
"""

from __future__ import annotations

import base64
import hashlib
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from miles_core.stages.prompts import for_template
from miles_core.stages.rollout import SamplingParams
from miles_tools.foreign import loads
from miles_tools.parts import source

MODEL = "miles"
"""The name of the one model there is."""
ROLES = ("system", "developer", "user", "assistant", "tool")
NEUTRAL = {"presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,), "min_p": (0,),
           "logit_bias": ({},), "seed": (), "parallel_tool_calls": (True,)}
"""Parameters that no run has, and the values with which they do nothing."""

Message = dict[str, Any]


class Refused(Exception):
    """A request that is not answered.

    Args:
        status: of the HTTP answer.
        sentence: what is wrong and what to do.
        code: OpenAI's word for it.
        again: whether the same request may fare better later.
    """

    def __init__(self, status: int, sentence: str, code: str = "invalid_request_error", *, again: bool = False):
        super().__init__(sentence)
        self.status, self.sentence, self.code, self.again = status, sentence, code, again


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of an agent.

    Args:
        messages: the conversation so far; see `readable`.
        tools: schemas of functions, as the chat template takes them.
        calls: whether calls of tools are looked for in the answer.
        stop: strings that end the answer, beside the run's.
        max_tokens: most tokens of the answer; None for the run's bound.
        stream, include_usage: whether the answer is a stream of events, and whether the last one counts tokens.
        ignored: sampling parameters that the run does not follow.
        images: files of the messages' images by the names that stand for them there, SHA-256.
        called_as: by the names of tools, what their calls say of themselves in the protocol's own form.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, object], ...] = ()
    calls: bool = True
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    stream: bool = False
    include_usage: bool = False
    ignored: tuple[str, ...] = ()
    images: Mapping[str, bytes] = field(default_factory=dict)
    called_as: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def loaded(body: bytes) -> dict[str, Any]:
    """The object that a request's body is.

    Raises:
        Refused: 400, not JSON, or no object.
    """
    try:
        data = loads(body)
    except ValueError as error:
        raise Refused(400, f"the body is not JSON that a session can hold: {error}"[:300]) from None
    if not isinstance(data, dict):
        raise Refused(400, "the body is not a JSON object")
    return data


def section(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object in a request, empty where there is none.

    Raises:
        Refused: 400, something else is in its place.
    """
    value = data.get(key) or {}
    if not isinstance(value, dict):
        raise Refused(400, f"{key} should be an object")
    return value


def listed(data: Mapping[str, Any], key: str = "messages") -> list[Any]:
    """The messages of a request.

    Raises:
        Refused: 400, there are none.
    """
    messages = data.get(key)
    if not isinstance(messages, list) or not messages:
        raise Refused(400, f"{key} should be a list of at least one message")
    return messages


def readable(message: object, where: str, images: dict[str, bytes]) -> Message:
    """A message in one form: text as a string, no key without a value; what a client adds to it does not matter.

    A developer's is the system's: that is OpenAI's newer word, and templates that do not know it leave the message out.

    Content with images is a list of parts, {"type": "text", "text": TEXT} and {"type": "image", "image": NAME}. An
    assistant's message is its content and its tool calls, whose arguments are text.

    Args:
        images: gets the files of its images by name.

    Raises:
        Refused: 400, an unknown role, content that is neither text nor images, or malformed tool calls.
    """
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise Refused(400, f"{where} should be an object with a role: {', '.join(ROLES)}")
    role = "system" if message["role"] == "developer" else message["role"]
    cleaned: Message = {"role": role, "content": _content(message.get("content"), where, images)}
    if message["role"] == "assistant":
        if message.get("function_call"):
            raise Refused(400, f"{where} has a function_call; write tool_calls")
        if calls := message.get("tool_calls"):
            cleaned["tool_calls"] = _calls(calls, where)
        return cleaned
    return cleaned | {key: value for key, value in message.items()
                      if key not in cleaned and value not in (None, [], {})}


def _content(content: object, where: str, images: dict[str, bytes]) -> str | list[dict[str, str]]:
    if content is None or isinstance(content, str):
        return content or ""
    parts = [_part(part, where, images) for part in (content if isinstance(content, list) else [None])]
    return parts if any(part["type"] == "image" for part in parts) else "".join(part["text"] for part in parts)


def _part(part: object, where: str, images: dict[str, bytes]) -> dict[str, str]:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if not isinstance(part, dict) or part.get("type") not in ("image", "image_url"):
        raise Refused(400, f"the content of {where} is neither text nor images, and a session has nothing else")
    try:
        data = base64.b64decode(re.sub(r"^data:[^,]*,", "", source(part)), validate=True)
    except (TypeError, ValueError):
        raise Refused(400, f"an image of {where} is not base64, and nothing is fetched or opened: send it as "
                           "data:image/png;base64,...") from None
    images[name := hashlib.sha256(data).hexdigest()] = data
    return {"type": "image", "image": name}


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    try:
        calls_read = [{"id": call.get("id"), "type": "function",
                  "function": {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}}
                 for call in calls]
        if not all(isinstance(call["function"][key], str) for call in calls_read for key in ("name", "arguments")):
            raise TypeError
    except (KeyError, TypeError, AttributeError):
        raise Refused(400, f"tool_calls of {where} should be a list of {{id, function: {{name, arguments}}}}, "
                           "arguments as text") from None
    return calls_read


def same(one: Message, other: Message) -> bool:
    """Whether two messages are one, however the arguments of their calls are written: a client may read 1.0 and write
    1."""
    return one == other or operator.eq(*for_template((one, other)))


def function(name: object, description: object, parameters: object) -> dict[str, Any]:
    """A tool as the chat template takes it."""
    return {"type": "function", "function": {"name": name, **({"description": description} if description else {}),
                                             "parameters": parameters or {"type": "object"}}}


def refuse_forced(choice: object, key: str, form: object) -> None:
    """What would change what tokens are drawn from.

    Raises:
        Refused: 400, a choice of tools that forces one, or a form of the answer, which is asked for under this key.
    """
    if form:
        raise Refused(400, f"a forced format would change what tokens are drawn from: leave {key} out, and say in the "
                           "prompt what you want", "unsupported_parameter")
    if choice not in (None, "auto", "none"):
        raise Refused(400, "a forced tool would change what tokens are drawn from: tool_choice is auto or none",
                      "unsupported_parameter")


def functions(tools: object) -> tuple[Mapping[str, object], ...]:
    if not isinstance(tools, list) or not all(
            isinstance(tool, dict) and isinstance(tool.get("function"), dict)
            and isinstance(tool["function"].get("name"), str) for tool in tools):
        raise Refused(400, "tools should be a list of {type: function, function: {name, ...}}")
    return tuple(tools)


def stops(stop: object) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or len(stops) > 16 or not all(isinstance(one, str) and one for one in stops):
        raise Refused(400, "stop should be a text or a list of at most 16 of them")
    return tuple(stops)


def count(data: Mapping[str, object], key: str) -> int:
    value = data[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise Refused(400, f"{key} should be a whole number above 0")
    return value


def ignored(data: Mapping[str, object], sampling: SamplingParams) -> tuple[str, ...]:
    """Names of the sampling parameters in a request that are not the run's."""
    ours = {"temperature": (sampling.temperature,), "top_p": (sampling.top_p,),
            "top_k": (sampling.top_k, *((0,) if sampling.top_k == -1 else ()))}
    return tuple(name for name, same in {**ours, **NEUTRAL}.items()
                 if data.get(name) is not None and data[name] not in same)
