"""Tools: functions of a file, what a template tells the model about them, and their answers.

A tool's file is run by the driver once, to read its signatures, and by the sandbox for each call.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core.errors import ConfigError
from miles_tools import builtin
from miles_tools.calls import Call
from miles_tools.parts import content
from miles_tools.sandbox import Outcome, Sandbox, SandboxError, explain


@dataclass(frozen=True, slots=True)
class Tool:
    """One function that a model may call.

    Args:
        schema: {"type": "function", "function": {...}}, what a chat template takes as one of its `tools`.
        parameters: names in order.
    """

    name: str
    file: str
    source: str
    schema: dict[str, Any]
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call brought: the text for the model, whether it failed, wall seconds.

    Args:
        overran: it used up the time of a call.
        parts: in place of the text where there are images: dicts of type "text" or "image", in their order.
    """

    text: str
    failed: bool = False
    seconds: float = 0.0
    overran: bool = False
    parts: tuple[dict[str, str], ...] = ()

    @property
    def images(self) -> list[str]:
        """Files in base64, in their order."""
        return [part["image"] for part in self.parts if part["type"] == "image"]


def load(wanted: Sequence[str]) -> dict[str, Tool]:
    """Tools by name.

    Args:
        wanted: a built-in tool's name, a file whose public functions are all meant, or FILE.py:NAME.

    Raises:
        ConfigError: none wanted, no such tool or file, a file that does not run, a function without type hints or
            docstring, two tools of one name.
    """
    tools: dict[str, Tool] = {}
    for item in wanted:
        for tool in _tools(item):
            if tool.name in tools:
                raise ConfigError(f"two tools are called {tool.name!r}", code="tool-name-twice", who="tools.tools",
                                  got=f"{tools[tool.name].file}, {tool.file}", fix="rename one of the functions")
            tools[tool.name] = tool
    if not tools:
        raise ConfigError("the generator tools needs at least one tool", code="tools-empty", who="tools.tools",
                          fix="--tools.tools calc, or a file of functions: --tools.tools FILE.py")
    return tools


def _tools(item: str) -> list[Tool]:
    file, _, name = item.partition(":")
    known = [name for name, _ in _functions(vars(builtin), builtin.__name__)]
    if not file.endswith(".py"):
        if item not in known:
            raise ConfigError("no such built-in tool", code="tool-unknown", got=item, who="tools.tools",
                              fix=f"use one of {', '.join(known)}, or a path to a file: FILE.py")
        source, scope = inspect.getsource(builtin), vars(builtin)
        return [_tool(item, scope[item], f"{item} (built-in)", source)]
    try:
        source = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("the file of tools cannot be read", code="tools-file-unreadable",
                          got=getattr(error, "strerror", None) or error, who=f"tools.tools {file}",
                          fix="check the path; Python files are UTF-8") from None
    scope = {"__name__": "miles_tools_file", "__file__": file}
    try:
        exec(compile(source, file, "exec"), scope)
    except Exception as error:
        raise ConfigError("the file of tools does not run", code="tools-file-failed",
                          got=f"{type(error).__name__}: {error}", who=f"tools.tools {file}",
                          fix="fix the error in the file") from error
    functions = dict(_functions(scope, "miles_tools_file"))
    chosen = {name: functions[name]} if name in functions else functions
    if not functions or (name and name not in functions):
        raise ConfigError("the file has no such function", code="tools-function-missing",
                          got=name or "no public function at all", who=f"tools.tools {file}",
                          fix=f"it has: {', '.join(functions) or 'none'}")
    return [_tool(name, function, file, source) for name, function in chosen.items()]


def _functions(scope: dict[str, Any], module: str) -> list[tuple[str, Any]]:
    return [(name, item) for name, item in scope.items()
            if inspect.isfunction(item) and item.__module__ == module and not name.startswith("_")]


def _tool(name: str, function: Any, file: str, source: str) -> Tool:
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    try:
        schema = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise ConfigError(f"no description can be made of tool {name!r}",
                          code="tool-description-failed", got=str(error), who=file,
                          fix="give each parameter a type hint, and the docstring an `Args:` with a line for each"
                          ) from None
    return Tool(name, file, source, schema, tuple(inspect.signature(function).parameters))


class Toolbox:
    """Makes calls.

    Args:
        tools: by name.
        sandbox: where they run.
    """

    def __init__(self, tools: dict[str, Tool], sandbox: Sandbox):
        self.tools, self._sandbox = tools, sandbox

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """What a chat template takes as `tools`."""
        return [tool.schema for tool in self.tools.values()]

    async def answer(self, call: Call) -> Answer:
        """The text that the model is told. Whatever the call or the tool does wrong is told as well.

        Raises:
            SandboxError: the sandbox failed twice, so the tool's answer is unknown.
        """
        if call.error is not None:
            return Answer(f"error: {call.error}", failed=True)
        tool = self.tools.get(call.name)
        if tool is None:
            return Answer(f"error: there is no tool {call.name!r}; there are: {', '.join(self.tools)}", failed=True)
        arguments = call.arguments
        if isinstance(arguments, str):
            if len(tool.parameters) != 1:
                return Answer(f"error: {tool.name} takes {', '.join(tool.parameters) or 'no argument'}", failed=True)
            arguments = {tool.parameters[0]: arguments}
        try:
            outcome = await self._sandbox.call(tool.source, tool.file, tool.name, arguments)
        except SandboxError:  # a fresh process may do
            outcome = await self._sandbox.call(tool.source, tool.file, tool.name, arguments)
        if outcome.kind != "ok":
            return Answer("\n".join(filter(None, (outcome.output.rstrip(), explain(outcome, self._sandbox.limits)))),
                          failed=True, seconds=outcome.seconds, overran=outcome.kind in ("time", "cpu"))
        return _answer(outcome)


def _answer(outcome: Outcome) -> Answer:
    """What a call that ended well printed, and then what it returned."""
    value, printed = outcome.value, outcome.output
    parts = content(value)
    if parts is not None and any(part["type"] == "image" for part in parts):
        before = [{"type": "text", "text": printed}] if printed else []
        return Answer("", seconds=outcome.seconds, parts=(*before, *parts))
    if parts is not None:
        value = "\n".join(part["text"] for part in parts)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if value is None:
        text = ""
    return Answer((printed + text).rstrip("\n"), seconds=outcome.seconds)
