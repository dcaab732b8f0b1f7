"""A session: one conversation with the policy, whose ids are only ever appended to.

Each request brings the whole conversation as messages. It has to begin with the messages of the request before and the
answer that was given to it; what follows them is rendered and appended, and nothing is ever tokenised again. An agent
that edits, drops or invents an earlier message, or changes its tools, is refused, and its sample is not trained on.
"""

from __future__ import annotations

import asyncio
import copy
import json
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np

from miles_core.errors import DataError, EngineError
from miles_core.stages.rollout import Generation, Request, Response, SamplingParams, call_engine
from miles_core.types import Drop, Prompt, Sample, Status, images_of
from miles_tools.calls import Call, parse
from miles_tools.images import behind, closed, filled, shown, shows
from miles_tools.session_request import Asked, Message, Refused
from miles_tools.transcript import Transcript

if TYPE_CHECKING:
    from miles_tools.template import Template

@dataclass(frozen=True, slots=True)
class Completion:
    """An answer.

    Args:
        message: the assistant's, as the agent has to send it back.
        finish_reason: "stop", "length" or "tool_calls".
        prompt_tokens, completion_tokens: of this turn.
        turn: how many there were before it.
    """

    message: Message
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    turn: int


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a sample is not trained on: a word that can be counted, and what a person wants to know."""

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class _Turn:
    """What a request adds: ids behind those that are there, or all that a conversation begins with, and images."""

    ids: Sequence[int]
    images: Sequence[str]


CALLED_BACK = Failure("aborted", "the group was called back")
"""Not the agent's doing: its prompt may come again."""


class Session:
    """One conversation.

    Args:
        template: tools -> how messages become ids.
        context: tokens that the conversation may have in all; those after its prompt are bounded by the run's
            rollout_max_response_len as well.
        matches: (a message that was there, the one that came back) -> whether it is the same.
    """

    def __init__(self, prompt: Prompt, index: int, generation: Generation, *, context: int,
                 template: Callable[[Sequence[Mapping[str, object]]], Template],
                 matches: Callable[[Message, Message], bool] = operator.eq):
        self._matches = matches
        self._prompt, self._index, self._generation = prompt, index, generation
        self._context, self._make_template = context, template
        self._template: Template | None = None
        self._tools: tuple[Mapping[str, object], ...] = ()
        self._transcript: Transcript | None = None
        self._last: Response | None = None
        self._busy = False
        self.messages: list[Message] = []
        self.turns = 0
        self.ignored = 0
        """Requests with sampling parameters that are not the run's."""
        self.engine_seconds = 0.0
        self.full = False
        """Whether a request found no room in the context, or an answer behind which nothing may stand."""
        self._closed = False
        """Whether the last answer ended with a token that would stand for an image."""
        self.failure: Failure | None = None
        self.error: Exception | None = None
        """What ends the run: the engine failed."""
        self._broken = asyncio.Event()

    @property
    def name(self) -> str:
        """How messages refer to it."""
        return f"{self._prompt.stream} prompt {self._prompt.uid} (row {self._prompt.row}), sample {self._index}"

    @property
    def sampling(self) -> SamplingParams:
        """The run's, which every answer is drawn with."""
        return self._generation.sampling

    async def broken(self) -> None:
        """Wait for `error`; whoever calls bounds it."""
        await self._broken.wait()

    async def complete(self, chat: Asked) -> Completion:
        """Answer one request.

        A call that is cancelled, or that the engine did not answer, leaves the conversation as it was.

        Raises:
            Refused: 400, it cannot be rendered or has no room; 409, another call is under way, or it rewrites what was
                there; 503, the group was called back.
            EngineError: the engine failed, or drew nothing; kept in `error`, like any other error.
        """
        if self._busy:
            raise Refused(409, "another request of this session is under way; a session is one conversation",
                          "conflict", again=True)
        self._busy = True
        try:
            return await self._draw(chat, self._turn(chat))
        except Exception as error:
            if not isinstance(error, Refused):
                self.error = error
                self._broken.set()
            raise
        finally:
            self._busy = False

    def to_sample(self, failure: Failure | None) -> Sample:
        """The conversation as a sample; with a failure, or without a turn, one that is not trained on.

        A sample is truncated when its last answer is, or when the agent asked for more than the context holds.
        """
        failure = self.failure or failure
        if self._last is None:
            failure = failure or (Failure("agent_out_of_context", "its first request left no room for an answer")
                                  if self.full else
                                  Failure("agent_never_called", "the agent ended without an answer of the model"))
        if failure is not None:
            return self._unfinished(failure)
        last, transcript = cast("Response", self._last), cast("Transcript", self._transcript)  # else it has failed
        truncated = self.full or last.finish_reason == "length"
        text = self._generation.decode(last.output_ids.tolist(), self.sampling.skip_special_tokens)
        sample = transcript.to_sample(self._prompt, self._index, text=text,
                                      status=Status.TRUNCATED if truncated else Status.COMPLETED)
        sample.metadata["messages"] = self.messages
        sample.metadata["figures"] |= {"agent/turns": float(self.turns),
                                       "agent/ignored_parameters": float(self.ignored)}
        return self._generation.on_response(sample, last)

    def task_messages(self) -> list[Message]:
        """The prompt for the agent, its images as data."""
        messages = self._prompt.messages or ({"role": "user", "content": self._prompt.text},)
        return filled(copy.deepcopy([dict(one) for one in messages]), self._prompt, self._generation)

    def _turn(self, chat: Asked) -> _Turn:
        """What a request adds, once it is rendered and there is room for an answer."""
        if self.failure is not None:
            raise self._over(self.failure)
        begun = self._transcript.ids if self._transcript is not None else []
        try:
            if not begun:
                self._template = self._make_template(chat.tools)
            template = cast("Template", self._template)  # made with the first request
            new = self._continued(chat) if begun else chat.messages
            images = [chat.images[name] for name in _images(new)]
            if images and not shows(self._generation):
                raise Refused(400, "a message has an image, and no plugin of this run shows images to the model; that "
                                   "is --plugin vision")
            rendered = [self._rendered(message) for message in new]
            text = template.suffix_text(rendered) if begun else template.text(rendered, self.name)
            turn = self._shown(text, images)
        except DataError as error:
            raise Refused(400, f"the messages cannot be rendered: {error}") from error
        if begun:
            turn = replace(turn, ids=template.joining(turn.ids, after=begun[-1]))
        size = len(begun) + len(turn.ids)
        if self._closed or self._room(size) < 1:
            self.full = True
            raise Refused(400, "the last answer ended with a token that would stand for an image, and nothing may "
                               "follow it" if self._closed else
                               f"{size} tokens leave no room for an answer: the context is {self._context}, and after "
                               f"the prompt there may be {self.sampling.max_new_tokens}", "context_length_exceeded")
        return turn

    def _room(self, size: int) -> int:
        """Tokens that are left for an answer to so many."""
        begun = 0 if self._transcript is None else size - self._transcript.prompt_length
        return min(self._context - size, self.sampling.max_new_tokens - begun)

    def _rendered(self, message: Message) -> Message:
        """A message as the template takes it; a special token in its text ends no turn, and is no image."""
        harmless = cast("Template", self._template).harmless
        content = message["content"]
        return {**message, "content": harmless(content) if isinstance(content, str) else [
            {"type": "image"} if part["type"] == "image" else {"type": "text", "text": harmless(part["text"])}
            for part in content]}

    def _shown(self, text: str, images: Sequence[bytes]) -> _Turn:
        """A rendered text as ids, in which images have their tokens."""
        ids = tuple(cast("Template", self._template).encode(text))
        turn = shown(replace(self._prompt, text=text, token_ids=ids, messages=None, metadata={}), images,
                     self._generation)
        if isinstance(turn, Drop):
            raise self._over(Failure(turn.reason, turn.detail))
        names = images_of(turn)
        if self._transcript is None:
            own = images_of(self._prompt)
            if list(names[: len(own)]) != list(own):
                raise Refused(400, f"the first request should begin with the {len(own)} images of the prompt, in their "
                                   "order")
            names = names[len(own):]
        return _Turn(turn.token_ids, names)

    def _continued(self, chat: Asked) -> Sequence[Message]:
        """The messages that a request adds; a request that does not begin with what was there fails the session."""
        size, problem = len(self.messages), None
        came = dict(enumerate(chat.messages))
        differs = next((i for i, old in enumerate(self.messages)
                        if i not in came or not self._matches(old, came[i])), None)
        if chat.tools != self._tools:
            problem = "the tools are not those of the first request"
        elif differs is not None and differs >= len(chat.messages):
            problem = f"there were {size} messages, the last answer included, and {len(chat.messages)} came back"
        elif differs is not None:
            own = self.messages[differs]["role"] == "assistant"
            problem = f"messages[{differs}] is not {'the answer that was given' if own else 'what it was'}"
        elif any(message["role"] == "assistant" for message in chat.messages[size:]):
            problem = "a new message is the assistant's, and the model did not write it"
        if problem is not None:
            raise self._over(Failure("agent_rewrote_history", problem))
        if size == len(chat.messages):
            raise Refused(400, "nothing follows the last answer: add a message, or end")
        return chat.messages[size:]

    def _over(self, failure: Failure) -> Refused:
        """End the conversation; what an agent that goes on is told."""
        self.failure = failure
        if failure is CALLED_BACK:
            return Refused(503, "the run has aborted this conversation; it will start over", "aborted")
        return Refused(409, f"{failure.detail}. A conversation is only ever appended to here; this one has ended and "
                            "will not be trained on", "conflict")

    async def _draw(self, chat: Asked, turn: _Turn) -> Completion:
        generation, sampling, transcript = self._generation, self.sampling, self._transcript
        ids = [*(transcript.ids if transcript is not None else ()), *turn.ids]
        room = self._room(len(ids))
        bound = min(room, chat.max_tokens or room)
        request = generation.on_request(Request(
            id=f"{self._prompt.stream}-{self._prompt.uid}-{self._index}-{self.turns}", input_ids=tuple(ids),
            sampling=replace(sampling, max_new_tokens=bound, min_new_tokens=min(sampling.min_new_tokens, bound),
                             stop=tuple(dict.fromkeys((*sampling.stop, *chat.stop)))),
            key=generation.key(self._index, self.turns)), self._seen(turn))
        begin = time.monotonic()
        response = await call_engine(generation, request)
        self.engine_seconds += time.monotonic() - begin
        if response.finish_reason not in ("stop", "length"):
            raise self._over(CALLED_BACK)
        if not len(response.output_ids):
            raise EngineError(f"the engine drew nothing for request {request.id}", code="engine-drew-nothing",
                              fix="look at the engine's log")
        self._closed = closed(int(response.output_ids[-1]), request, sampling)
        return self._commit(chat, turn, len(ids), response)

    def _seen(self, turn: _Turn) -> Prompt:
        """The prompt with the images of all turns so far, this one's among them."""
        before = [] if self._transcript is None else [name for _, name in self._transcript.images]
        return behind(self._prompt, [*before, *turn.images])

    def _commit(self, chat: Asked, turn: _Turn, prompt_tokens: int, response: Response) -> Completion:
        if self._transcript is None:
            self._transcript, self._tools = Transcript.begin(turn.ids, turn.images), chat.tools
        else:
            self._transcript.append_suffix(turn.ids, turn.images)
        self._transcript.append_drawn(response)
        message, called = self._message(chat, response)
        self.messages = [*chat.messages, message]
        self._last, self.turns = response, self.turns + 1
        self.ignored += bool(chat.ignored)
        reason = "tool_calls" if called and response.finish_reason == "stop" else response.finish_reason
        return Completion(message, reason, prompt_tokens, len(response.output_ids), self.turns - 1)

    def _message(self, chat: Asked, response: Response) -> tuple[Message, bool]:
        """The answer as a message, without its end token and the stop text; whether it calls tools."""
        text = self._generation.decode(response.output_ids.tolist(), True)
        cuts = [at for stop in chat.stop if (at := text.find(stop)) >= 0]
        text = text[: min(cuts, default=None)]
        calls: Sequence[Call] = ()
        if chat.tools and chat.calls:
            content, parsed = parse(text)
            if not any(call.error for call in parsed):  # else the agent gets to see what the model wrote
                text, calls = content, parsed
        message: Message = {"role": "assistant", "content": text}
        if calls:
            message["tool_calls"] = [
                {"id": f"call_{self.turns}_{i}", "type": "function",
                 "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
                for i, call in enumerate(calls)]
        return message, bool(calls)

    def _unfinished(self, failure: Failure) -> Sample:
        """A sample of no response tokens: nothing of it can be trained on by mistake, and nothing goes on from it."""
        status, metadata = Status.ABORTED, {}
        if failure is not CALLED_BACK:
            status = Status.FAILED
            metadata = {"messages": self.messages,
                        "drop": {"reason": failure.reason, "detail": f"{self.name}: {failure.detail}"}}
        return Sample(
            prompt=self._prompt, index=self._index, status=status, metadata=metadata,
            columns={"tokens": np.array(self._prompt.token_ids, np.int32), "loss_mask": np.zeros(0, np.uint8),
                     "rollout_log_probs": np.zeros(0, np.float32), "versions": np.zeros(0, np.int32)})  # fmt: skip


def _images(messages: Sequence[Message]) -> list[str]:
    """Names of their images, in order."""
    return [part["image"] for message in messages if isinstance(message["content"], list)
            for part in message["content"] if part["type"] == "image"]
