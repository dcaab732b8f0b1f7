"""Tool calls in a drawn text: found by their form, and never an exception, whatever a model writes.

    hermes   <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>     Hermes, Qwen
    tag      <calc>1+2</calc>                                                          the text is the only argument
    fenced   ```python                                                                 the block is the argument of
             print(1 + 2)                                                              the tool of that name
             ```
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from miles_tools.foreign import loads

THINKING_ENDS = "</think>"
_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Call:
    """One call as the model wrote it.

    Args:
        arguments: by name, or the text that is the tool's only argument.
        error: what is wrong with its form; such a call is answered with it and not made.
    """

    name: str
    arguments: dict[str, object] | str
    error: str | None = None


def parse(text: str, format: str = "hermes", names: Sequence[str] = ()) -> tuple[str, list[Call]]:
    """What a turn says beside its calls, and the calls in order. Reasoning up to the last </think> makes no calls.

    Args:
        format: "hermes", "tag" or "fenced".
        names: of the tools that there are; "tag" and "fenced" find calls by them.
    """
    thought, ended, answer = text.rpartition(THINKING_ENDS)
    pattern = _HERMES if format == "hermes" else _pattern(format, names)
    if pattern is None:
        return text, []
    calls = [_hermes(match) if format == "hermes" else _text_call(match) for match in pattern.finditer(answer)]
    return thought + ended + pattern.sub("", answer), calls


def _pattern(format: str, names: Sequence[str]) -> re.Pattern[str] | None:
    either = "|".join(map(re.escape, names))
    if not either:
        return None
    if format == "tag":
        return re.compile(rf"<({either})>(.*?)(</\1>|\Z)", re.DOTALL)
    return re.compile(rf"^```({either})[ \t]*\n(.*?)(^```[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)


def _hermes(match: re.Match[str]) -> Call:
    body, closed = match.groups()
    if not closed:
        return Call("", {}, "the call is not closed: write </tool_call> after it")
    try:
        call = loads(body)
        if isinstance(call, dict) and isinstance(call.get("arguments"), str):
            call["arguments"] = loads(call["arguments"])
    except ValueError as error:
        reason = f"{error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else str(error)
        return Call("", {}, f"the call is not JSON: {reason}")
    if not (isinstance(call, dict) and isinstance(call.get("name"), str)
            and isinstance(call.get("arguments", {}), dict)):
        return Call("", {}, 'the call should be {"name": ..., "arguments": {...}}')
    return Call(call["name"], call.get("arguments", {}))


def _text_call(match: re.Match[str]) -> Call:
    name, body, closed = match.groups()
    return Call(name, body.strip("\n"), None if closed else f"the call of {name} is not closed")
