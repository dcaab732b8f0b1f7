"""How generate functions of Miles ask the engine, and append what it and tools answer to their sample."""

from __future__ import annotations

import copy
import inspect
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from miles_compat.sample import Sample


def engine_url(args: Any, endpoint: str = "/generate") -> str:
    """Where a function asks the run's engine."""
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}{endpoint}"


def get_model_url(args: Any, model_name: str, endpoint: str = "/generate") -> str:
    """The same: a run has one model."""
    return engine_url(args, endpoint)


def compute_prompt_ids_from_sample(state: Any, sample: Sample, tools: Any = None) -> list[int]:
    """Token ids of a sample's prompt, which may be chat messages."""
    prompt: Any = sample.prompt
    if not isinstance(prompt, str):
        prompt = state.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, tools=tools)
    return list(state.tokenizer.encode(prompt, add_special_tokens=False))


def policy_uses_routing_key(args: Any) -> bool:
    """No: samples of a run go to the engine that the run picks."""
    return False


def compute_routing_headers(args: Any, sample: Sample) -> dict[str, str] | None:
    """Headers that tell a router where to send a request."""
    return {"X-SMG-Routing-Key": sample.routing_key} if sample.routing_key else None


def compute_request_payload(args: Any, input_ids: Sequence[int], sampling_params: Mapping[str, Any],
                            multimodal_inputs: object = None) -> tuple[dict[str, Any] | None, Any]:
    """(what /generate is asked, None), or (None, the status of a sample that has no room for an answer)."""
    params = copy.deepcopy(dict(sampling_params))
    most = params.pop("max_new_tokens", args.rollout_max_response_len)
    if args.rollout_max_context_len:
        most = min(most, args.rollout_max_context_len - len(input_ids))
    if most <= 0:
        return None, Sample.Status.TRUNCATED
    return {"input_ids": list(input_ids), "sampling_params": {**params, "max_new_tokens": most},
            "return_logprob": True}, None


async def update_sample_from_response(args: Any, sample: Sample, payload: Mapping[str, Any],
                                      output: Mapping[str, Any], update_loss_mask: bool = False) -> None:
    """Append what was drawn."""
    if not sample.response and not sample.tokens:
        sample.tokens = list(payload["input_ids"])
    sample.append_answer(output, mask=update_loss_mask)
    sample.update_from_meta_info(args, output["meta_info"])


class Parser:
    """Finds calls of tools in a turn, as <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

    def parse_non_stream(self, text: str) -> tuple[str, list[Any]]:
        """The text beside the calls, and the calls that are well formed."""
        from types import SimpleNamespace

        from miles_tools.calls import parse

        rest, calls = parse(text)
        return rest, [SimpleNamespace(name=call.name, parameters=json.dumps(call.arguments), tool_index=number)
                      for number, call in enumerate(calls) if call.error is None]


FORMATS = ("qwen", "qwen25", "qwen3", "hermes", None)
"""Parsers of SGLang whose calls look so."""


def create_tool_call_parser(tool_specs: object, tool_call_parser: str | None) -> Parser:
    """
    Raises:
        HookError: calls that look otherwise.
    """
    from miles_core.errors import HookError

    if tool_call_parser not in FORMATS:
        raise HookError("calls of this format are not read here", code="tool-call-parser-unknown", got=tool_call_parser,
                        who="--generate-tool-call-parser", fix="write qwen25, whose calls are JSON in <tool_call>")
    return Parser()


async def execute_tool_calls(tool_calls: Sequence[Any], execute_one: Callable[..., Any]) -> list[dict[str, Any]]:
    """A message of the role tool for each call, in order."""
    messages = []
    for call in tool_calls:
        function = getattr(call, "function", call)
        arguments = getattr(function, "arguments", None) or getattr(function, "parameters", None) or "{}"
        answer = execute_one(function.name, json.loads(arguments))
        answer = await answer if inspect.isawaitable(answer) else answer
        messages.append({"role": "tool", "tool_call_id": getattr(call, "id", f"call_{uuid.uuid4().hex[:24]}"),
                         "content": str(answer), "name": function.name})
    return messages


def update_sample_with_tool_responses(sample: Sample, tool_messages: Sequence[Mapping[str, Any]],
                                      tokenizer: Any) -> None:
    """Append what tools answered, which is not trained on."""
    ids = tokenize_tool_responses(tool_messages, tokenizer, sample.tokens[-1])
    sample.response += tokenizer.decode(ids)
    sample.tokens = [*sample.tokens, *ids]
    sample.response_length += len(ids)
    sample.loss_mask = [*(sample.loss_mask or ()), *[0] * len(ids)]
    sample.rollout_log_probs = [*(sample.rollout_log_probs or ()), *[0.0] * len(ids)]


def tokenize_tool_responses(tool_messages: Sequence[Mapping[str, Any]], tokenizer: Any,
                            after: int | None = None) -> list[int]:
    """The ids that the chat template writes after a turn: these messages, and the opening of the next turn.

    Args:
        after: the turn's last id; None for one that has its end, as the engine draws it.
    """
    from miles_tools.template import Template

    return Template(tokenizer, {}).suffix(list(tool_messages), tokenizer.eos_token_id if after is None else after)
