"""Agents of Miles: a function talks to the policy over an OpenAI endpoint, and what was said is the sample."""

from __future__ import annotations

import inspect
import json
import operator
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from miles_compat.loading import load_function
from miles_compat.paths import noted
from miles_compat.rollout_types import GenerateFnInput, GenerateFnOutput
from miles_compat.sample import runs_of, seen
from miles_compat.session import CURRENT, Drawn
from miles_core.columns import CORE
from miles_core.errors import HookError

if TYPE_CHECKING:
    from miles_compat.args import Args

KEYS = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
"""Sampling parameters that OpenAI's protocol calls otherwise."""
TAKEN = ("temperature", "top_p", "max_tokens", "stop", "seed")
"""What the endpoint takes of them."""


CALL: ContextVar[tuple[dict[str, Any], GenerateFnInput]] = ContextVar("what the agent under way is asked and told")


def build_chat_request_kwargs(sampling_params: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters as fields of a request for a chat completion."""
    renamed = {KEYS.get(name, name): value for name, value in sampling_params.items()}
    return {name: value for name, value in renamed.items() if name in TAKEN and value not in (None, [])}


async def generate(input: GenerateFnInput) -> GenerateFnOutput:
    """The samples of one run of the agent of --custom-agent-function-path, one of each conversation.

    Raises:
        HookError: it is not called by the run, or the picker gives no sample.
    """
    session = CURRENT.get(None)
    if session is None or session.prompt is None:
        raise HookError("an agent needs a prompt of the run", code="agent-without-prompt",
                        who="custom_agent_function_path",
                        fix="--custom-generate-function-path miles.rollout.generate_hub.agentic_tool_call.generate")
    args = input.args
    told: dict[str, Any] = {}
    agents = _agents(args)
    token = CALL.set((told, input))  # the agent runs in a task of this one
    try:
        made = await agents.samples(session.prompt, session.index, session.generation)
    finally:
        CALL.reset(token)
    samples = [seen(one, session.generation.samples) for one in made]
    for sample, one in zip(samples, made, strict=True):
        sample.metadata |= told
        session.drawn += _answers(one, session.generation.sampling.temperature)
    if not made[0].status.finished:  # it failed, and the sample says why
        return GenerateFnOutput(samples[0])
    picked: Any = samples
    if args.session_sample_picker_path:
        for number, sample in enumerate(samples):
            sample.metadata.setdefault("leaf", {"node_id": number, "parent": None, "path_node_ids": [number]})
        numbers = range(len(samples))
        tree = {"leaves": [{"node_id": number, "path_node_ids": [number]} for number in numbers],
                "nodes": [{"id": number, "parent": None} for number in numbers]}
        picked = await _plain(noted(load_function(args.session_sample_picker_path))(samples, {"tree": tree, **told}))
    if args.session_sample_postprocessor_path:
        listed = picked if isinstance(picked, list) else [picked]
        picked = await _plain(noted(load_function(args.session_sample_postprocessor_path))(listed, dict(told)))
    if isinstance(picked, list) and not picked:
        samples[0].remove_sample, picked = True, samples[:1]  # nothing of it is trained on
    return GenerateFnOutput(picked)


async def _plain(answer: Any) -> Any:
    return await answer if inspect.isawaitable(answer) else answer


def _answers(made: Any, temperature: float) -> list[Drawn]:
    """The engine's answers in a conversation: what is trained on, with the sample's own log-probs and versions."""
    from miles_core.stages.rollout import Response

    prompt, columns = made.length - made.response_length, made.columns
    core = {one.name for one in CORE}
    read = {name: array for name, array in columns.items() if name not in core}
    return [Drawn(tuple(made.tokens[:prompt + start].tolist()),
                  Response(made.tokens[prompt + start:prompt + stop], columns["rollout_log_probs"][start:stop],
                           columns["versions"][start:stop], "stop"), temperature,
                  read if stop == made.response_length else {})
            for start, stop in runs_of(columns["loss_mask"])]


def _agents(args: Args) -> Any:
    """The run's agents and their endpoint, made when the first is asked for."""
    if "agents" not in args._made:
        args._made["agents"] = _made(noted(load_function(args.custom_agent_function_path)), args)
    return args._made["agents"]


def _made(function: Callable[..., Any], args: Args) -> Any:
    from miles_tools.agent import Agents
    from miles_tools.agent_call import AgentFailed, Task
    from miles_tools.plugin import ToolsOptions

    async def call(task: Task, address: str) -> None:
        told, input = CALL.get()
        given = {"base_url": address, "prompt": input.sample.prompt if isinstance(input.sample.prompt, list)
                 else task.messages, "request_kwargs": build_chat_request_kwargs(input.sampling_params),
                 "metadata": {**input.sample.metadata, **bound}}
        try:
            answer = await function(**given)
        except Exception as error:
            where = " ".join(["", *getattr(error, "__notes__", ())])
            raise AgentFailed("agent_failed", f"{type(error).__name__}: {error}{where}") from error
        if not isinstance(answer, Mapping | None):
            raise HookError("an agent should return a dict of what is known of its session, or None",
                            code="agent-function-return", got=repr(answer)[:100], who="custom_agent_function_path",
                            fix='return {"reward": ...} for the reward function to read in sample.metadata')
        told.update(answer or {})

    bound = {"max_seq_len": args.max_seq_len} if args.max_seq_len else {}
    options = ToolsOptions(**args._config.options.get("tools", {}))
    return Agents(options, args._config, call, matcher(args.session_message_matcher))


def matcher(name: str) -> Callable[[Any, Any], bool]:
    """Whether two messages are the same, by the name or the path that --session-message-matcher gives."""
    matches: Callable[[Any, Any], bool] = MATCHERS.get(name) or load_function(name)
    return matches


def _calls(message: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Names and arguments of a message's calls, without their ids."""
    def read(text: Any) -> Any:
        try:
            return json.loads(text)
        except (TypeError, ValueError):
            return text

    functions = [call.get("function", {}) for call in message.get("tool_calls") or ()]
    return [(one.get("name"), read(one.get("arguments"))) for one in functions]


def _said(message: Mapping[str, Any]) -> tuple[Any, Any]:
    return message.get("role"), message.get("content") or ""


MATCHERS: Mapping[str, Callable[[Any, Any], bool]] = MappingProxyType({
    "strict": operator.eq,
    "loose_tool_call": lambda old, new: (_said(old), _calls(old)) == (_said(new), _calls(new)),
    "role_content_only": lambda old, new: _said(old) == _said(new),
})
"""Miles's names of comparisons."""
