"""Several turns: draw, make the calls, append their answers, draw again; token in, token out.

A conversation ends with a turn that calls no tool or calls one of `ending_tools` (completed), when its tokens or turns
are used up or its calls overrun again and again (truncated), when the engine is told to end it (aborted: it goes on
later with what it has), or by an image that cannot be shown (failed). A draw depends on generation.key(sample, engine
call) alone.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from miles_core.errors import ConfigError, DataError
from miles_core.stages.rollout import Generation, Request, Response, call_engine
from miles_core.types import Drop, Prompt, Sample, Status, images_of
from miles_tools.calls import Call, parse
from miles_tools.images import behind, closed, shown
from miles_tools.template import Template
from miles_tools.template import load as load_tokenizer
from miles_tools.toolbox import Answer, Toolbox
from miles_tools.toolbox import load as load_tools
from miles_tools.transcript import Transcript

if TYPE_CHECKING:
    from miles_core.config import RunConfig
    from miles_tools.plugin import ToolsOptions
    from miles_tools.sandbox import Sandbox

FIGURES = ("turns", "tool_calls", "tool_errors", "tool_overruns", "tool_time")
OVERRUNS = 3
"""Calls of a sample that use up their time, after which it is truncated: a tool that hangs would do so in each turn."""


@dataclasses.dataclass(frozen=True, slots=True)
class Conversations:
    """What every conversation of a run shares.

    Args:
        context: tokens that the model can hold.
    """

    template: Template
    toolbox: Toolbox
    options: ToolsOptions
    context: int

    async def group(self, prompt: Prompt, generation: Generation) -> list[Sample]:
        """A conversation for each sample, side by side; those that were called back go on.

        Raises:
            DataError: the prompt is no conversation, or leaves no room with its tools.
            EngineError, SandboxError: what a sample depends on failed.
        """
        opened = self.opened(prompt, generation)
        if isinstance(opened, Drop):
            return [Sample(prompt, 0, status=Status.FAILED, metadata={"drop": dataclasses.asdict(opened)})]
        prompt = opened
        talks = [asyncio.ensure_future(self._one(prompt, index, generation)) for index in range(generation.samples)]
        try:
            return list(await asyncio.gather(*talks))
        finally:
            for talk in talks:
                talk.cancel()  # the others, when one failed

    def opened(self, prompt: Prompt, generation: Generation) -> Prompt | Drop:
        """The prompt as the template writes it with the tools; a drop where its images cannot be shown so.

        Raises:
            DataError: the prompt is no conversation, or leaves no room with its tools.
        """
        where = f"{prompt.stream} row {prompt.row}"
        if prompt.messages is None:
            raise DataError("the prompt is already rendered text", code="prompt-already-rendered", who=where,
                            fix="add --apply-chat-template")
        text = self.template.text(prompt.messages, where)
        ids = tuple(self.template.encode(text))
        opened = shown(dataclasses.replace(prompt, text=text, token_ids=ids), (), generation)
        if isinstance(opened, Prompt) and (size := len(opened.token_ids)) >= self.context:
            raise DataError(f"the prompt has {size} tokens with its tools and leaves no room for an answer",
                            got=f"a context of {self.context}", code="prompt-with-tools-too-long", who=where,
                            fix="shorten it, or leave long prompts out with --rollout-max-prompt-len N")
        return opened

    async def _one(self, prompt: Prompt, index: int, generation: Generation) -> Sample:
        begun = next((sample for sample in generation.begun if sample.index == index), None)
        if begun is not None and begun.status is not Status.ABORTED:
            return begun
        talk = _Conversation(self, prompt, index, generation, begun)
        while (status := await talk.turn()) is None:
            pass
        return talk.sample(status)


class _Conversation:
    """One sample on its way."""

    def __init__(self, shared: Conversations, prompt: Prompt, index: int, generation: Generation,
                 begun: Sample | None):
        self._shared, self._prompt, self._index, self._generation = shared, prompt, index, generation
        self._transcript = Transcript.begin(prompt.token_ids) if begun is None else Transcript.resume(begun)
        saved = {} if begun is None else begun.metadata["begun"]
        self._draws = saved.get("draws", 0)
        self._figures = {name: saved.get(name, 0) for name in FIGURES}
        self._most = min(generation.sampling.max_new_tokens, shared.context - len(prompt.token_ids))
        self._begun = begun
        self._last: Response | None = None
        self._drop: Drop | None = None

    async def turn(self) -> Status | None:
        """Draw, and answer the calls; how the conversation ends, None while it goes on."""
        generation, transcript, sampling = self._generation, self._transcript, self._generation.sampling
        room = self._most - transcript.response_length
        if room <= 0:
            return Status.TRUNCATED
        request = generation.on_request(Request(
            id=f"{self._prompt.stream}-{self._prompt.uid}-{self._index}-{self._draws}",
            input_ids=tuple(transcript.ids), resumed=tuple(transcript.last_turn),
            sampling=dataclasses.replace(sampling, max_new_tokens=room,
                                         min_new_tokens=min(room, max(0, sampling.min_new_tokens - transcript.drawn))),
            key=generation.key(self._index, self._draws),
        ), self._seen())
        response = await call_engine(generation, request)
        self._draws += 1
        transcript.append_drawn(response)
        self._last = response if len(response.output_ids) else self._last
        if response.finish_reason not in ("stop", "length"):
            return Status.ABORTED
        self._figures["turns"] += 1
        if response.finish_reason == "length":
            return Status.TRUNCATED
        return Status.COMPLETED if closed(transcript.ids[-1], request, sampling) else await self._answered()

    def _seen(self) -> Prompt:
        """The prompt with the images of all turns so far."""
        return behind(self._prompt, [name for _, name in self._transcript.images])

    async def _answered(self) -> Status | None:
        options, transcript = self._shared.options, self._transcript
        text = self._text(self._shared.template.without_end(transcript.last_turn, self._generation.sampling.stop))
        calls = parse(text, options.tool_format, tuple(self._shared.toolbox.tools))[1]
        if not calls:
            return Status.COMPLETED
        if any(call.name in options.ending_tools and call.error is None for call in calls):
            self._figures["tool_calls"] += len(calls)
            return Status.COMPLETED
        if self._figures["turns"] >= options.generate_max_turns:
            return Status.TRUNCATED
        answers = []
        for call in calls:
            answers.append(await self._answer(call))
            if self._figures["tool_overruns"] >= OVERRUNS:
                return Status.TRUNCATED
        return self._append([{"role": options.tool_role, "name": call.name, "content": self._content(answer),
                              "tool_call_id": f"call_{number}"}
                             for number, (call, answer) in enumerate(zip(calls, answers, strict=True))],
                            [image for answer in answers for image in answer.images])

    def _append(self, messages: Sequence[Mapping[str, Any]], images: Sequence[str]) -> Status | None:
        """Messages behind the drawn turn, with images in the order of their parts."""
        transcript, template = self._transcript, self._shared.template
        text = template.suffix_text(messages)
        turn = shown(dataclasses.replace(self._prompt, text=text, token_ids=tuple(template.encode(text)), metadata={},
                                         messages=None), images, self._generation)
        if isinstance(turn, Drop):
            self._drop = turn
            return Status.FAILED
        suffix = template.joining(turn.token_ids, transcript.ids[-1], self._generation.sampling.stop)
        if transcript.response_length + len(suffix) >= self._most:
            return Status.TRUNCATED
        transcript.append_suffix(suffix, images_of(turn))
        return None

    async def _answer(self, call: Call) -> Answer:
        answer = await self._shared.toolbox.answer(call)
        self._figures["tool_calls"] += 1
        self._figures["tool_errors"] += answer.failed
        self._figures["tool_overruns"] += answer.overran
        self._figures["tool_time"] += answer.seconds
        return answer

    def _content(self, answer: Answer) -> str | list[dict[str, str]]:
        """As a template takes it; its texts share one bound."""
        template, room = self._shared.template, self._shared.options.tool_response_tokens
        content: list[dict[str, str]] = []
        for part in answer.parts or ({"type": "text", "text": answer.text},):
            if part["type"] == "image":
                content.append({"type": "image"})
                continue
            text = template.shortened(template.harmless(part["text"]), room)
            room = max(0, room - len(template.encode(text)))
            content.append({"type": "text", "text": text})
        return content if answer.parts else content[0]["text"]

    def sample(self, status: Status) -> Sample:
        """What the conversation comes to; its text is that of the last turn, which is what scorers judge."""
        transcript = self._transcript
        if self._last is None and self._begun is not None:
            return dataclasses.replace(self._begun, status=status)
        sample = transcript.to_sample(self._prompt, self._index, status=status, text="")
        sample.text = self._text(transcript.last_turn, self._generation.sampling.skip_special_tokens)
        sample.metadata["figures"] |= {name: float(value) for name, value in self._figures.items()}
        sample.metadata["conversation"] = self._text(sample.tokens[transcript.prompt_length:].tolist())
        if self._drop is not None:
            sample.metadata["drop"] = dataclasses.asdict(self._drop)
        if status is Status.ABORTED:
            sample.metadata["begun"] = {"draws": self._draws, "mask": transcript.mask, **self._figures}
        if self._begun is not None:  # plugins may have marked it
            sample.metadata = {key: mark for key, mark in self._begun.metadata.items() if key != "begun"
                               } | sample.metadata
        if self._last is None or status is Status.ABORTED and not transcript.last_turn:
            return sample  # it ends with what no answer of the engine is about
        return self._generation.on_response(sample, self._last)

    def _text(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self._generation.decode(ids, skip_special_tokens)


def of(options: ToolsOptions, config: RunConfig, sandbox: Sandbox) -> Conversations:
    """The conversations of a run.

    Raises:
        ConfigError, DataError: tools, tokenizer or template do not fit.
    """
    toolbox = Toolbox(load_tools(options.tools), sandbox)
    template = Template(load_tokenizer(config), config.rollout.apply_chat_template_kwargs or {}, toolbox.schemas)
    return Conversations(template, toolbox, options, cast("int", config.rollout.rollout_max_context_len))


def check(options: ToolsOptions, config: RunConfig) -> None:
    """What can be known of tools and template before anything is sampled.

    Raises:
        ConfigError: no tools, or ending tools that there are not.
        DataError: the template leaves out the answers of tools, or rewrites earlier turns.
    """
    tools = load_tools(options.tools)
    if unknown := [name for name in options.ending_tools if name not in tools]:
        raise ConfigError("an unknown tool cannot end a conversation", got=unknown, who="tools.ending_tools",
                          fix=f"use one of {', '.join(tools)}", code="ending-tool-unknown")
    arguments = config.rollout.apply_chat_template_kwargs or {}
    template = Template(load_tokenizer(config), arguments, [tool.schema for tool in tools.values()])
    template.check(options.tool_role, rewriting=options.allow_rewriting_template)
