"""The harness `miles-verifiers`: a chat loop with the task's tools, in the process that plays the episode.

verifiers' own loop, `null`, is a program that uv starts for every sample, which takes seconds on an idle core; this one
does the same without a process. An answer that calls no tool ends the conversation, and so does a full context.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

import verifiers.v1 as vf
from openai import APIStatusError, AsyncOpenAI
from verifiers.v1.harnesses.utils.compaction import is_context_overflow
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

from miles_verifiers.rows import messages_of


class InProcess(vf.Harness[vf.HarnessConfig]):
    """Asks the policy and calls the task's tools."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx: vf.ModelContext, trace: vf.Trace, runtime: vf.Runtime, endpoint: str, secret: str,
                     mcp_urls: dict[str, str], data: vf.TaskData) -> vf.ProgramResult:
        """Play one segment of a conversation; see `vf.Harness.launch`."""
        wanted = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None) as client, AsyncExitStack() as stack:
            tools, dispatch, servers = await connect_mcp({"mcpServers": wanted}, stack)
            messages, offered = messages_of(*self.resolve_prompt(data)), {"tools": tools} if tools else {}
            while True:
                try:
                    completion = await client.chat.completions.create(model=ctx.model, messages=messages, **offered)
                except APIStatusError as error:
                    if not is_context_overflow(error):
                        raise
                    break
                message = completion.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    break
                for call in message.tool_calls:
                    answer = await _answer(call.function.name, call.function.arguments, dispatch, servers)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": answer})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def _answer(name: str, arguments: str, dispatch: dict[str, tuple[str, str]], servers: dict[str, Any]) -> Any:
    """What a tool says; what is wrong with a call is said to the policy."""
    if name not in dispatch:
        return f"error: unknown tool {name!r}"
    try:
        parsed = json.loads(arguments or "{}")
    except json.JSONDecodeError as error:
        return f"error: the arguments are no JSON ({error})"
    if not isinstance(parsed, dict):
        return f"error: the arguments should be a JSON object, got {type(parsed).__name__}"
    return await call_mcp(servers, dispatch, name, parsed)
